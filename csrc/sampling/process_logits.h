// process_logits: penalties, additions, forced tokens and masks on rows of logits, each for its own node's prefix.
#pragma once
#include "distribution/distribution.h"

namespace specdec {

// Packed trees; nodes[r] is the node that row r of the logits follows (nullptr: row r follows node r).
struct EditPaths {
  const int64_t* tokens;
  const int32_t *parents, *offsets, *roots, *nodes;
  int64_t num_nodes, requests;
};

// Parts that are absent have null pointers.
struct EditPenalties {
  const float* factors;  // [requests, 3]: repetition, presence, frequency
  const int32_t *rows, *ids, *counts, *sizes;
  int64_t table_rows, capacity;
};

struct EditAdditions {
  const int32_t *offsets, *ids;
  const float* values;
  const int32_t* until;
  int64_t count;
};

struct EditForced {
  const int32_t *offsets, *positions, *ids;
  int64_t count;
};

struct EditMasks {
  const int32_t *words, *index;
  int64_t count, width;
};

struct LogitsProcessors {
  EditPaths paths;
  EditPenalties penalties;
  EditAdditions additions;
  EditForced forced;
  EditMasks masks;
};

// nullptr if every argument is in range, else the name of the one that is not and the index of its first bad element.
const char* invalid_edits(const Matrix& logits, const LogitsProcessors& edits, int64_t* at);

// Edits the rows in place. Ids outside the vocabulary are passed over.
void process_logits(const Matrix& logits, const LogitsProcessors& edits);

}  // namespace specdec
