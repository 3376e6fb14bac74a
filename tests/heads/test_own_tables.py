"""Embeddings and projections of heads: used where they differ from the target's, shared without a copy where not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from torch import Tensor, nn

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.checkpoint_eagle import load_eagle, save_eagle
from specdec_fast.heads.own_tables import same_values, split_tables, target_table

CONFIG = {**heads.LAYER, "bias": False}
GREEDY = SamplingParams(temperature=0, max_new_tokens=16)


def bare(seed: int = 0) -> dict[str, Tensor]:
    """Tensors of an EAGLE-1 head without tables."""
    tensors = heads.eagle_tensors(seed, bias=False)
    del tensors["embed_tokens.weight"]
    return tensors


def random_table(seed: int, rows: int = heads.VOCAB, columns: int = heads.HIDDEN) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def drafts(folder: Path, **options: Any) -> tuple[list[Any], Any]:
    """Returns all drafts of a greedy text, and the head."""
    target = models.target("llama", max_rows=1)
    drafter: Any = make_drafter("eagle", {"head": str(folder), "depth": 3, "width": 4, **options}, target=target)
    seen, propose = [], drafter.propose

    def watched(*args: Any) -> Any:
        draft = propose(*args)
        seen.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft

    drafter.propose = watched
    handle = Engine(target, drafter).generate([models.prompt(17)], GREEDY)[0]
    assert handle.tokens == models.greedy_text("llama", 17, 16) and handle.stats.faults == 0
    return seen, drafter.model.head


def test_a_head_over_an_embedding_of_its_own_drafts_the_same(tmp_path: Path) -> None:
    """The head's embedding is the target's, turned; its fc turns it back. So it is the same head, said otherwise."""
    tensors, table = bare(), models.untouched("llama").get_input_embeddings().weight.detach()
    turn = torch.linalg.qr(random_table(3, heads.HIDDEN))[0]
    turned = tensors["fc.weight"].clone()
    turned[:, : heads.HIDDEN] = turned[:, : heads.HIDDEN] @ turn
    own = tensors | {"fc.weight": turned, "embed_tokens.weight": (table @ turn).contiguous()}
    plain, _ = drafts(heads.write(tmp_path / "plain", CONFIG, tensors))
    folder = heads.write(tmp_path / "own", CONFIG, own)
    found, head = drafts(folder)
    assert found == plain and len(plain) > 5 and head.embed_tokens is not None
    without, head = drafts(folder, own_tables=False)
    assert without != plain and head.embed_tokens is None


def test_a_projection_of_its_own_is_used(tmp_path: Path) -> None:
    """Its rows are the target's in another order, so the drafted tokens are permuted."""
    table = models.untouched("llama").get_output_embeddings().weight.detach()
    order = torch.randperm(heads.VOCAB, generator=torch.Generator().manual_seed(1))
    head = load_eagle(
        heads.write(tmp_path, CONFIG, bare() | {"lm_head.weight": table[order].contiguous()}),
        models.target("llama", max_rows=1),
    )
    hidden = torch.randn(5, heads.HIDDEN)
    want = (hidden @ table.T)[:, order]
    assert torch.allclose(head.read(hidden, lambda _: pytest.fail("the target's is not to be read")), want, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_copies_take_no_memory_in_any_dtype(tmp_path: Path, dtype: torch.dtype, kept: torch.dtype) -> None:
    model = models.own("llama", kept)
    tables = {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach().to(dtype),
        "lm_head.weight": model.get_output_embeddings().weight.detach().to(dtype),
    }
    target = HuggingFaceTarget(model, max_rows=1, max_length=64)
    head = load_eagle(heads.write(tmp_path, CONFIG, bare() | {k: v.clone() for k, v in tables.items()}), target)
    assert head.embed_tokens is None and head.lm_head is None
    assert not any("embed_tokens" in key or "lm_head" in key for key in head.state_dict())


def test_padding_is_no_difference_and_takes_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = HuggingFaceTarget(models.own("llama"), max_rows=1, max_length=64, vocab_size=90)
    table = models.untouched("llama").get_input_embeddings().weight.detach()
    other = table.clone()
    other[90:] = 7.0  # rows of padding, which no token uses
    for at, rows in enumerate((other, other[:90].clone(), torch.cat([other, torch.ones(32, heads.HIDDEN)]))):
        fields = {**CONFIG, "vocab_size": len(rows)}
        tensors = bare() | {"embed_tokens.weight": rows}
        assert load_eagle(heads.write(tmp_path / f"same{at}", fields, tensors), target).embed_tokens is None
        changed = tensors | {"embed_tokens.weight": rows + 0.01}
        with caplog.at_level(logging.INFO, "specdec_fast"):
            head = load_eagle(heads.write(tmp_path / f"own{at}", fields, changed), target)
        assert head.embed_tokens is not None and head.embed_tokens.num_embeddings == 90
        assert "drafts with its own embed_tokens.weight, which differs from the target's" in caplog.text


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("embed_tokens.weight", (80, 64), r"is \[80, 64\]; expected 64 columns and a row for each of the 96 token ids"),
        ("lm_head.weight", (80, 64), r"lm_head\.weight is \[80, 64\]; expected 64 columns and a row"),
        ("embed_tokens.weight", (96, 32), r"is \[96, 32\]; expected 64 columns"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, name: str, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_eagle(
            heads.write(tmp_path, CONFIG, bare() | {name: torch.zeros(shape)}), models.target("llama", max_rows=1)
        )


def test_a_table_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    broken = random_table(2)
    broken[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight holds numbers that are not finite"):
        load_eagle(
            heads.write(tmp_path, CONFIG, bare() | {"embed_tokens.weight": broken}), models.target("llama", max_rows=1)
        )


def test_a_difference_in_the_last_row_of_a_large_table_is_seen() -> None:
    one = random_table(1, 9000, 3)
    other = one.clone()
    assert same_values(one, other, 9000) and same_values(one, other.bfloat16(), 9000)
    other[8999, 2] += 0.5
    assert not same_values(one, other, 9000) and same_values(one, other, 8999)


def test_a_target_whose_tables_are_no_ordinary_tensors_shares_none() -> None:
    """Quantized or absent tables cannot be compared, so the head keeps its own."""

    class Packed(Tensor):
        pass

    table = random_table(1)
    embedding = nn.Embedding.from_pretrained(table)
    target: Any = type("Target", (), {"vocab_size": heads.VOCAB})()
    target.model = type("Model", (), {"get_input_embeddings": lambda self: embedding})()
    assert not split_tables({"embed_tokens.weight": table.clone()}, "x", target, heads.HIDDEN)
    for weight in (table.as_subclass(Packed), table.to("meta"), table.to(torch.int8)):
        object.__setattr__(embedding, "_parameters", {"weight": weight})
        assert target_table(target, "embed_tokens.weight") is None
        assert split_tables({"embed_tokens.weight": table.clone()}, "x", target, heads.HIDDEN)


def test_own_tables_are_written_and_read_back(tmp_path: Path) -> None:
    target = models.target("llama", max_rows=1)
    own = {"embed_tokens.weight": random_table(4), "lm_head.weight": random_table(5)}
    head = load_eagle(heads.write(tmp_path / "a", CONFIG, bare() | own), target)
    save_eagle(tmp_path / "b", head, embedding=target.model.get_input_embeddings().weight)
    again = load_eagle(tmp_path / "b", target)
    assert set(again.state_dict()) == set(head.state_dict()) >= set(own)
    for key, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
