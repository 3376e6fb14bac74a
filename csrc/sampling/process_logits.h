// process_logits: applies penalties, additions, forced tokens and masks to logits [R, V], each row for the prefix of its
// node. The trees are packed: B requests with M nodes.
#pragma once
#include "distribution/distribution.h"

namespace specdec {

struct TreePaths {
  const int64_t* tokens;  // [M]
  // [M], [B + 1], [B] positions of the roots, [R] node of each row (nullptr: row r belongs to node r).
  const int32_t *parents, *offsets, *roots, *nodes;
  int64_t num_nodes, requests;  // M, B
};

// Absent processors have null pointers.
struct Penalties {
  const float* factors;  // [B, 3]: repetition, presence, frequency
  // Counts of committed tokens: rows [B] in the table, ids and counts [table_rows, capacity], sizes [table_rows].
  const int32_t *rows, *ids, *counts, *sizes;
  int64_t table_rows, capacity;
};

// values[i] is added to token ids[i] at positions below until[i].
struct Additions {
  const int32_t *offsets, *ids;  // [B + 1], [count]
  const float* values;           // [count]
  const int32_t* until;          // [count]
  int64_t count;
};

// Only token ids[i] is allowed at positions[i].
struct ForcedTokens {
  const int32_t *offsets, *positions, *ids;  // [B + 1], [count], [count]
  int64_t count;
};

// Bit v of row index[r] of `words` allows token v in row r of the logits; index -1: no mask.
struct TokenMasks {
  const int32_t *words, *index;  // [count, width], [R]
  int64_t count, width;
};

struct LogitsProcessors {
  TreePaths paths;
  Penalties penalties;
  Additions additions;
  ForcedTokens forced;
  TokenMasks masks;
};

// The name of the first argument out of range and the index of its first bad element, or nullptr.
const char* invalid_processors(const Matrix& logits, const LogitsProcessors& processors, int64_t* at);

// Changes the rows in place. Ids outside the vocabulary are ignored.
void process_logits(const Matrix& logits, const LogitsProcessors& processors);

}  // namespace specdec
