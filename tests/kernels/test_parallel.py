"""csrc/parallel.h: finding the first of several items that threads test concurrently, in a small program."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HEADER = (Path(__file__).parents[2] / "csrc" / "parallel.h").read_text("utf-8")
PROGRAM = r"""
#include <chrono>
#include <thread>

#include "parallel.h"

namespace specdec {
void run_parallel(int64_t begin, int64_t end, int64_t, RangeFunction function, void* context) {
  std::thread other([&] { function(begin, begin + 1, context); });
  function(begin + 1, end, context);
  other.join();
}
int thread_count() { return 2; }
}  // namespace specdec

int main() {
  using specdec::first_in_order;
  // all hold, two are tested at a time, and either of them may be the one that is ready last
  for (int count : {2, 3})  // as many as threads, and more
    for (int slow = 0; slow < 2; ++slow) {
      std::atomic<int> begun{0};
      const int64_t found = first_in_order(count, true, [&](int64_t i) {
        for (++begun; begun < 2;) std::this_thread::yield();
        if (i == slow) std::this_thread::sleep_for(std::chrono::milliseconds(30));
        return true;
      });
      if (found != 0) return 1 + slow;
    }
  for (bool together : {false, true})
    for (int64_t first = 0; first <= 40; ++first) {
      std::atomic<int64_t> tested{0};
      const int64_t found = first_in_order(40, together, [&](int64_t i) {
        ++tested;
        return i >= first && i % 3 == first % 3;
      });
      if (found != first) return 3;  // 40: none of them
      if (first < 40 && !together && tested != first + 1) return 4;
      if (tested < (first < 40 ? first + 1 : 40)) return 5;
    }
  return 0;
}
"""


def test_the_first_in_order_is_found_in_any_order_of_completion() -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        (Path(folder) / "parallel.h").write_text(HEADER, "utf-8")
        call = [compiler, "-O1", "-std=c++20", f"-I{folder}", "-x", "c++", "-", "-o", str(program), "-pthread"]
        subprocess.run(call, input=PROGRAM, text=True, check=True)
        done = subprocess.run([str(program)], timeout=60, check=False)
    assert done.returncode == 0, f"check {done.returncode} of the program failed"
