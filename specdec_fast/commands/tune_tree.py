"""`specdec tune tree`: the best static tree for a pair of models, from acceptance measured by rank and depth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json
from specdec_fast.core.shell_commands import generate_command

_PROMPTS = 16  # of the bundled workload
_SIZES = (4, 8, 16, 32, 64)
_RECURRENT = ("eagle", "eagle3", "mtp")
_TUNED = ("draft_tree", "medusa", *_RECURRENT)


def tree(
    model: options.Model = "demo-target",
    draft: options.DraftModel = None,
    adapter: options.Adapter = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: Annotated[
        str, typer.Option("--drafter", help="Drafter: draft_tree, medusa, eagle, eagle3 or mtp.")
    ] = "draft_tree",
    drafter_option: options.DrafterOptions = None,
    nodes: Annotated[int, typer.Option(help="Number of draft nodes, without the root.")] = 16,
    depth: Annotated[int, typer.Option(help="Deepest level to measure.")] = 8,
    width: Annotated[int, typer.Option(help="Maximum number of children of a node.")] = 8,
    how: Annotated[str, typer.Option(help="Order of children: coupled (rule replay) or top_k.")] = "coupled",
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            help="File with prompts, as in `generate`, without sampling parameters (default: bundled prompts).",
        ),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Treat every line of the file as a prompt.")] = False,
    new_tokens: Annotated[int, typer.Option(help="Tokens that the target generates per prompt.")] = 64,
    temperature: options.Temperature = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", "-s", help="Seed of the first prompt; each further prompt uses the next number.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Result file; use it with `-o shape=FILE`.")] = Path("tree-shape.json"),
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Find the static tree with the most expected tokens per step, for a draft model or a trained head.

    The command that uses it is printed. Expected tokens say nothing about time: larger trees cost more per step.
    """
    if drafter not in _TUNED:
        raise ValueError(f"--drafter: got {drafter!r}, which takes no shape; expected one of {', '.join(_TUNED)}")
    if how not in ("coupled", "top_k"):
        from specdec_kernels.unknown_names import unknown_name

        raise ValueError(unknown_name("--how", how, ("coupled", "top_k")))
    if min(nodes, depth, width, new_tokens) < 1:
        raise ValueError(
            f"--nodes, --depth, --width, --new-tokens: got {nodes}, {depth}, {width}, {new_tokens}; expected at least 1"
        )
    from specdec_fast.commands import open_engine
    from specdec_fast.commands.prompts import bundled_workload, one_of_each, read_prompts
    from specdec_fast.sampling.params import SamplingParams
    from specdec_fast.trees.static_shape import Shape, best_shape, expected_spread, expected_tokens, write_shape
    from specdec_fast.tune.draft_tree_acceptance import measure
    from specdec_fast.tune.parallel_head_acceptance import measure_heads
    from specdec_fast.tune.recurrent_head_acceptance import measure_recurrent

    if out.is_dir():
        raise ValueError(f"--out: got {str(out)!r}, a folder; expected a file to write")
    out.parent.mkdir(parents=True, exist_ok=True)
    open_engine.quiet()
    given = list(drafter_option or ())
    if drafter == "medusa":  # a tree of the depth and width to measure
        wide = [-1, *[0] * width, *(at if at == 1 else at + width - 1 for at in range(1, depth))]
        given += [f"shape={wide}", f"pick={'coupled' if how == 'coupled' else 'greedy'}"]
    setup = open_engine.resolve(
        model=model, draft=draft, drafter=drafter, rule="replay", draft_tokens=None,
        dtype=dtype, device=device, compile=False, drafter_option=given, adapter=adapter, revision=revision,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    engine = open_engine.open_engine(setup, threads=threads, max_rows=8)
    made: Any = engine.drafter
    if file is not None:
        prompts: list[Any] = list(read_prompts(None, file, lines))
    else:
        prompts = [item.prompt for item in one_of_each(bundled_workload(), _PROMPTS)]
    ids = [engine.encode(prompt) for prompt in prompts]
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=new_tokens)
    ends = engine.eos_token_ids
    if drafter == "medusa":
        rates, tokens = measure_heads(engine.target, made, ids, params, eos_token_ids=ends)
    else:
        measured = measure_recurrent if drafter in _RECURRENT else measure
        rates, tokens = measured(
            engine.target, made.model, ids, params, how=how, width=width, depth=depth, eos_token_ids=ends
        )
    if not rates[0][0]:
        raise ValueError(
            f"tune tree: the first choice of {drafter} was accepted for none of {tokens} tokens; expected one; measure "
            "on more text (--new-tokens, --file), or train the drafter further"
        )
    shape = best_shape(rates, nodes)
    expected, noise = expected_tokens(shape, rates), expected_spread(shape, rates, tokens)
    chain = expected_tokens(Shape(tuple(range(-1, shape.num_nodes))), rates)
    use = {"--model": model, "--draft": draft, "--adapter": adapter, "--revision": revision,
           "--trust-remote-code": trust_remote_code, "--dtype": None if dtype == "float32" else dtype,
           "--device": None if device == "cpu" else device, "--drafter": drafter}  # fmt: skip
    own = options.read_drafter_options(drafter_option) | {"shape": str(out)}
    if drafter in ("eagle", "eagle3"):
        own["depth"] = 0
    if how == "top_k":
        own |= {"pick": "greedy"} if drafter == "medusa" else {"how": "top_k"}
    command = generate_command(use, own)
    facts = {
        "model": model, "drafter": drafter, "draft": setup.draft, "how": how, "temperature": temperature, "seed": seed,
        "prompts": len(prompts), "tokens": tokens, "expected_tokens": expected, "rates": rates,
        "noise": noise, "expected_of_chain": chain,
        "expected_by_nodes": {size: expected_tokens(best_shape(rates, size), rates) for size in _SIZES},
    }  # fmt: skip
    write_shape(out, shape, facts)
    if as_json:
        print_json({"file": str(out), "parents": list(shape.parents), "command": command, **facts})
        return
    print(f"{out}: {shape.num_nodes} nodes, {expected:.2f} +- {noise:.2f} tokens per step expected (95 % interval)")
    if expected - chain <= noise:
        print(f"a chain of as many nodes expects {chain:.2f}: the gain of the tree is within the noise")
    print(f"measured on {tokens} tokens of {len(prompts)} prompts; rate of the first choices by depth:")
    for level, row in enumerate(rates):
        print(f"  {level + 1}: " + " ".join(f"{rate:.3f}" for rate in row[:6]))
    for size in _SIZES:
        print(f"  {size:>3} nodes: {expected_tokens(best_shape(rates, size), rates):.2f} tokens per step")
    print(f"use it with\n{command}")
