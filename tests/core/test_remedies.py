"""Refused requests carry their remedy as a key, and their message as before."""

from __future__ import annotations

import pickle

from specdec_fast.core.remedies import RefusedError, Remedy, stated


def test_fault_and_remedy_are_separate() -> None:
    error = RefusedError("messages: got none; expected one", Remedy.OTHER_MESSAGES)
    assert str(error) == "messages: got none; expected one; change them, or pass another chat_template"
    assert stated(error, {Remedy.OTHER_MESSAGES: "change them"}) == "messages: got none; expected one; change them"
    assert stated(ValueError("a; b"), {}) == "a; b"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.fault, copy.remedy, str(copy)) == (error.fault, error.remedy, str(error))
