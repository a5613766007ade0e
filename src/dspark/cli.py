"""The `dspark` command: thin. Every command parses its options, calls one function of a room and prints."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

from dspark import __version__
from dspark.bench.bench_command import bench_command
from dspark.bench.metrics import Answer, summarise
from dspark.bench.overlap import rows_overlap, unseen_rows
from dspark.bench.report_commands import gate_command, report_command
from dspark.calibration.command import calibrate_command
from dspark.calibration.schedule import choose_schedule
from dspark.checkpoints.builtin import EMBEDDED_DRAFT, draft_folder, load_named_draft
from dspark.checkpoints.convert_command import convert_command, statements
from dspark.checkpoints.hub import draft_source
from dspark.checkpoints.read import GGUF_SUFFIX, inspected
from dspark.cli_output import (
    StreamPrinter,
    acceptance_table,
    generate,
    json_result,
    regenerated_lines,
    round_record,
    summary_line,
)
from dspark.data.chat import ChatRenderer
from dspark.data.invent import invent, read_openings, write_prompts
from dspark.data.notes import Part, read_notes
from dspark.data.prompts import read_prompts, shard_prompts
from dspark.data.regenerate import RegenerateSettings, refuse_folder, regenerate
from dspark.data.rows import check_ids, detect_loop, read_rows
from dspark.decoding.drafting import DraftProposer
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Request, SamplingSettings
from dspark.demo import run_demo
from dspark.doctor.command import doctor_command
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.inspect import parameter_counts
from dspark.errors import DsparkError
from dspark.kernels.library import library
from dspark.publishing.card_command import card_command
from dspark.publishing.publish_command import publish_command
from dspark.serving.command import serve_command
from dspark.serving.launch.launch_command import launch_command
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target
from dspark.training.features import (
    FeatureWriter,
    InProcessFeatures,
    cache_features,
    feature_source,
    features_folder,
)
from dspark.training.recipe import load_recipe
from dspark.training.trainer import train as run_training

app = typer.Typer(
    name="dspark",
    help="Train, check, measure and serve DSpark speculators: faster decoding, the same tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()
errors = Console(stderr=True)

Dtype = Literal["fp32", "bf16"]
DemoStorage = Literal["bfloat16", "exact"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

TargetOption = Annotated[str, typer.Option(help="Model folder, hub name, or the embedded target.")]
DraftOption = Annotated[str, typer.Option(help="Draft folder, `embedded` (the shipped one), or `none` (plain).")]
NeededDraftOption = Annotated[str, typer.Option(help="Draft folder, or `embedded` (the shipped one).")]
WidthOption = Annotated[
    int | None,
    typer.Option("-n", help="Draft tokens a round, up to the draft's gamma (the default; 7 for the shipped one)."),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Weights of target and draft; float32 is the fast one on a CPU.")]
TemplateOption = Annotated[
    Literal["chat", "none"], typer.Option(help="`none` gives the prompt as plain text, for a model without a template.")
]
DraftModeOption = Annotated[
    Literal["block", "prefix"], typer.Option(help="`prefix` runs gamma slots and keeps n: a diagnostic.")
]


def example(*lines: str) -> str:
    """The example that ends a command's help."""
    return "Example:\n\n" + "\n\n".join(lines)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options that need no command."""
    if version:
        console.print(__version__)
        raise typer.Exit


@app.command("generate", epilog=example("dspark generate --prompt 'What is 12 * 3?' -n 3"))
def generate_command(
    prompt: Annotated[str, typer.Option(help="What to ask; rendered with the target's chat template.")],
    target: TargetOption = EMBEDDED,
    draft: DraftOption = EMBEDDED_DRAFT,
    n: WidthOption = None,
    draft_mode: DraftModeOption = "block",
    max_tokens: Annotated[int, typer.Option(help="Answer tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens (0: all).")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same ids, with any draft and n.")] = None,
    template: TemplateOption = "chat",
    dtype: DtypeOption = "fp32",
    schedule: Annotated[
        str | None, typer.Option(help="auto, fixed, early-stop or delayed  [default: auto; fixed with -n]")
    ] = None,
    confidence_threshold: Annotated[
        float | None, typer.Option(help="Verify drafts up to the first less sure one: a diagnosis.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the stream.")] = False,
) -> None:
    """Answer one prompt, coloured by round: a draft proposes, the target verifies, the output is the target's."""
    sampling = SamplingSettings(temperature, top_k, top_p, min_p, seed)
    if not prompt.strip():
        raise DsparkError("prompt", prompt, "is empty; give some text")
    if draft == "none" and n is not None:
        raise DsparkError("n", n, "plain decoding has no draft tokens; leave it out")
    loaded = load_target(target, DTYPES[dtype])
    drafted = None if draft == "none" else load_named_draft(draft, DTYPES[dtype])
    wanted = schedule or ("auto" if n is None and draft_mode == "block" else "fixed")
    chosen = choose_schedule(loaded, drafted, draft_folder(draft), n, wanted, confidence_threshold)
    proposer = make_proposer(loaded, drafted, n, draft_mode, chosen.schedule is not None, chosen.scaling)
    engine = Engine(loaded, proposer, schedule=chosen.schedule)
    ids = ChatRenderer(loaded.tokenizer, template=template).prompt_ids([{"role": "user", "content": prompt}])
    printer = None if as_json else StreamPrinter(console, loaded.tokenizer)
    answer = generate(engine, Request(ids, max_tokens, sampling), loaded.tokenizer, printer)
    if as_json:
        print(json.dumps({**json_result(answer), "schedule": chosen.line}))
    else:
        console.print(summary_line(answer), style="dim", soft_wrap=True)


@app.command(
    "regenerate",
    epilog=example("dspark regenerate --prompts prompts.jsonl --out runs/rows.jsonl --capture smollm2-135m"),
)
def regenerate_command(
    prompts: Annotated[str, typer.Option(help="JSONL file or folder of {id, turns}, or hub:NAME.")],
    out: Annotated[Path, typer.Option(help="Rows file to write or to go on with.")],
    target: TargetOption = EMBEDDED,
    limit: Annotated[int | None, typer.Option(help="Prompts at most (the first ones, after --shuffle).")] = None,
    shuffle: Annotated[int | None, typer.Option(help="Seed of their order; without it, file order.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Answer tokens at most; longer answers are cut and marked.")] = 512,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Leave longer prompts out (counted).")] = None,
    temperature: Annotated[
        str, typer.Option(help="0 is greedy; several (0.5,0.7,1.0): each prompt draws one by its id.")
    ] = "0",
    top_k: Annotated[int, typer.Option()] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampled answers.")] = 0,
    batch: Annotated[int, typer.Option(help="Requests in flight.")] = 32,
    shard: Annotated[
        str | None, typer.Option(help="I/N: only part I = 0..N-1 of the prompts (one --out each).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; left as it is when not given.")] = None,
    capture: Annotated[str | None, typer.Option(help="Recipe whose taps are kept beside the rows.")] = None,
    template: TemplateOption = "chat",
    capture_dtype: Annotated[Dtype, typer.Option(help="Storage of captured states.")] = "bf16",
    dtype: DtypeOption = "fp32",
) -> None:
    """Let the target answer prompts: the only answers a draft should be trained on. Run again to resume."""
    refuse_folder(out)
    settings = RegenerateSettings(_temperatures(temperature), top_k, top_p, min_p, seed, max_tokens, max_prompt_tokens)
    asked = read_prompts(prompts, limit, shuffle)
    if shard is not None:
        asked = shard_prompts(asked, *_shard(shard))
    if threads is not None:
        if threads < 1:
            raise DsparkError("threads", threads, "must be at least 1")
        torch.set_num_threads(threads)
    recipe = None if capture is None else load_recipe(capture, [])
    taps = () if recipe is None else tuple(recipe.draft["target_layer_ids"])
    loaded = load_target(target, DTYPES[dtype])
    loaded.check_taps(taps)
    engine = Engine(loaded, None, max_batch=batch, capture_taps=taps)
    renderer = ChatRenderer(loaded.tokenizer, template=template)
    part = Part(prompts=Path(prompts).name or prompts, limit=limit, shuffle=shuffle, shard=shard)
    features: AbstractContextManager[FeatureWriter | None] = nullcontext()
    if taps:
        features = FeatureWriter(features_folder(out), loaded, taps, capture_dtype)
    try:
        with features as writer:
            report = regenerate(engine, loaded, asked, out, settings, renderer, writer, [prompts], part)
            if writer is not None and report.summary.rows:
                # rows whose states were still in memory when an earlier run was killed
                cache_features(InProcessFeatures(loaded, taps), read_rows(out), writer)
    except KeyboardInterrupt:
        errors.print("interrupted; the same command goes on from here")
        raise typer.Exit(130) from None
    console.print(regenerated_lines(report) + f"\nwritten to {out}", markup=False, highlight=False, soft_wrap=True)


@app.command("invent", epilog=example("dspark invent --count 2000 --out runs/prompts/invented.jsonl"))
def invent_command(
    out: Annotated[Path, typer.Option(help="Prompts file (JSONL) to write; must not exist yet.")],
    count: Annotated[int, typer.Option(help="Prompts to ask for; unfinished and repeated ones are left out.")] = 1000,
    target: TargetOption = EMBEDDED,
    openings: Annotated[Path | None, typer.Option(help="Beginnings of user turns, one a line; else our own.")] = None,
    temperature: Annotated[float, typer.Option(help="Above 0.")] = 1.0,
    top_p: Annotated[float, typer.Option()] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Tokens after the opening at most.")] = 80,
    seed: Annotated[int, typer.Option()] = 0,
    batch: Annotated[int, typer.Option(help="Requests in flight.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; left as it is when not given.")] = None,
) -> None:
    """Let the target write prompts: it is given the beginning of a user turn and continues it."""
    if out.exists():
        raise DsparkError("out", str(out), "exists already; choose another name")
    beginnings = read_openings(openings)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_target(target)
    engine, renderer = Engine(loaded, None, max_batch=batch), ChatRenderer(loaded.tokenizer)
    found = invent(
        engine, renderer, beginnings, count, seed=seed, temperature=temperature, top_p=top_p, max_tokens=max_tokens
    )
    write_prompts(out, found)
    console.print(f"{len(found)} prompts of {count} asked for written to {out}", markup=False, soft_wrap=True)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise DsparkError("temperature", text, "must be a number, or several with commas between them") from None


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise DsparkError("shard", text, "must be I/N with 0 <= I < N, e.g. 0/2 and 1/2")
    return int(index), int(count)


@app.command("train", epilog=example("dspark train smollm2-135m training.steps=2000 training.out=runs/mine"))
def train_command(
    recipe: Annotated[str, typer.Argument(help="Recipe name or path.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Overrides: section.key=value, e.g. training.lr=1e-3 data.held_out=8.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in training.out.")] = False,
) -> None:
    """Train a draft by a recipe: rows, features, loss, validation by replay, checkpoints."""
    chosen = load_recipe(recipe, settings or [])
    result = run_training(chosen, resume=resume, console=console)
    if result.interrupted:
        raise typer.Exit(130)
    program = sys.argv[0] if Path(sys.argv[0]).name == "dspark" else "dspark"
    target = [] if chosen.target == EMBEDDED else ["--target", chosen.target]
    attempt = [program, "generate", *target, "--draft", str(result.best), "--prompt", "Why is the sky blue?"]
    console.print(
        f"best draft: {result.best}, try\n{shlex.join(attempt)}", markup=False, highlight=False, soft_wrap=True
    )


@app.command("replay", epilog=example("dspark replay --rows runs/rows.jsonl --draft runs/mine/best --unseen -n 7"))
def replay_command(
    rows: Annotated[Path, typer.Option(help="Rows file; its .features folder is used when it is there.")],
    target: TargetOption = EMBEDDED,
    draft: NeededDraftOption = EMBEDDED_DRAFT,
    n: WidthOption = None,
    draft_mode: DraftModeOption = "block",
    unseen: Annotated[bool, typer.Option("--unseen", help="Only prompts the draft was not trained on.")] = False,
    limit: Annotated[int | None, typer.Option(help="Rows at most.")] = None,
    batch: Annotated[int, typer.Option(help="Rows walked side by side.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Round records of every row as one JSON object.")] = False,
) -> None:
    """Acceptance of a draft on rows the target wrote greedily, equal round by round to serving them."""
    for name, value in (("limit", limit), ("batch", batch)):
        if value is not None and value < 1:
            raise DsparkError(name, value, "must be at least 1")
    drafted, found = load_named_draft(draft), read_rows(rows)
    if unseen:
        found = unseen_rows(draft_folder(draft), found)
    found = [row for row in found if len(row.answer_ids) > 1][:limit]
    if not found:
        raise DsparkError("rows", str(rows), "holds no answer of two tokens or more, so there is no round to replay")
    sampled = next((row for row in found if row.temperature > 0), None)
    if sampled is not None:
        raise DsparkError("rows", f"row {sampled.id} at temperature {sampled.temperature}", "must be greedy answers")
    loaded, notes = load_target(target), read_notes(rows)
    check_ids(found, loaded.vocab_size)
    if notes is not None and notes.target not in (None, loaded.name):
        raise DsparkError("rows", str(rows), f"was written by {notes.target!r}, not by {loaded.name!r}")
    proposer = make_proposer(loaded, drafted, n, draft_mode)
    assert isinstance(proposer, DraftProposer)
    source = feature_source(rows, loaded, proposer.taps)
    walked = replay(proposer, ((row, source.get(row).taps.float()) for row in found), batch, loaded.max_context)
    answers = [Answer(row.source, rounds, detect_loop(row.text_ids)) for row, rounds in zip(found, walked, strict=True)]
    summary, overlap = summarise(answers, proposer.n), rows_overlap(draft_folder(draft), found)
    if as_json:
        known = {**overlap.to_json(), "line": str(overlap)}
        records = {row.id: [round_record(r) for r in rounds] for row, rounds in zip(found, walked, strict=True)}
        print(json.dumps({"n": proposer.n, **asdict(summary), "overlap": known, "rounds_by_row": records}))
    else:
        console.print(acceptance_table(summary, f"replay, n = {proposer.n}, greedy"))
        console.print(str(overlap), style="bold red" if overlap.warning else None, markup=False, soft_wrap=True)


@app.command(
    "inspect", epilog=example("dspark inspect kimi-k3", "dspark inspect runs/mine/best", "dspark inspect draft.gguf")
)
def inspect_command(
    draft: Annotated[str, typer.Argument(help="Recipe name or path, draft of any form, or `embedded`.")],
    state: Annotated[list[str] | None, typer.Option(help="KEY=VALUE that the file lacks; repeatable.")] = None,
) -> None:
    """Parameters of a draft, by part, and what it expects of its target, from its headers alone.

    Of a draft that is there, names and shapes of all tensors are compared with what its config gives.
    """
    source = draft_source(draft)
    is_draft = source.is_dir() or source.suffix == GGUF_SUFFIX
    header, missing = inspected(source, **statements(state)) if is_draft else (None, [])
    config = load_recipe(draft, []).draft_config() if header is None else header.config
    counts = parameter_counts(config)
    table = Table("part", "parameters", title=f"{draft}: a draft for {config.target_name}")
    for part, count in counts.items():
        table.add_row(part, f"{count:,}", style="bold" if part == "total" else "")
    console.print(table)
    if isinstance(config, Eagle3Config):
        kind = f"one by one (EAGLE-3, {config.attention} attention)"
    else:
        kind = f"a block ({'anchor-first' if config.sample_from_anchor else 'bonus-anchor'})"
    console.print(
        f"{config.gamma} predictions {kind}, taps {list(config.target_layer_ids)}, "
        f"draft vocabulary {config.draft_vocab_size:,} of {config.vocab_size:,}"
    )
    if header is not None:
        console.print(f"{header.form} form; its {len(header.shapes)} tensors have the names and shapes of its config")
        for note in [*header.notes, *(f"not in the file: {name}" for name in missing)]:
            console.print(note, markup=False, highlight=False, soft_wrap=True)


@app.command("demo", epilog=example("dspark demo --out demo.html"))
def demo_command(
    target: TargetOption = EMBEDDED,
    draft: NeededDraftOption = EMBEDDED_DRAFT,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("demo.html"),
    max_tokens: Annotated[int, typer.Option(help="Answer tokens at most.")] = 64,
    storage: Annotated[
        DemoStorage | None,
        typer.Option(
            help="How the target's weights are kept: rounded to bfloat16, as most targets are published, or exact "
            "(the smallest way that holds every one)  [default: bfloat16; exact without compiled kernels]"
        ),
    ] = None,
) -> None:
    """Plain decoding against DSpark at n = 3 and n = 7 on 15 prompts: same tokens, a table and a page."""
    kept: DemoStorage = storage or ("exact" if library() is None else "bfloat16")
    loaded = load_target(target, storage=None if kept == "exact" else kept)
    named = f"{kept} weights, {loaded.weight_bytes / 1e6:.0f} MB a pass"
    comparison = run_demo(loaded, load_named_draft(draft), out, max_tokens=max_tokens, draft_name=draft, weights=named)
    if not comparison.lossless:
        raise typer.Exit(1)


app.command(
    "bench",
    epilog=example(
        "dspark bench --suite demo --out runs/bench",
        "dspark bench --data DIR --suite gsm8k,humaneval --draft a=embedded --draft b=runs/mine/best@7 --out runs/ab",
        "dspark bench --data DIR --suite gsm8k --endpoint http://127.0.0.1:8000 --engine vllm --out runs/live",
    ),
)(bench_command)
app.command("report", epilog=example("dspark report runs/bench", "dspark report runs/a runs/b --out runs/a-b"))(
    report_command
)
app.command("gate", epilog=example("dspark gate runs/bench --min-acceptance 2.2 --min-speedup 1.1"))(gate_command)
app.command(
    "calibrate",
    epilog=example(
        "dspark calibrate --draft runs/mine/best --data DIR --suite gsm8k,mbpp --out runs/calibration",
        "dspark calibrate --profile-only",
        "dspark calibrate --draft runs/mine/best --export sglang --export-out runs/for-sglang",
    ),
)(calibrate_command)
app.command(
    "convert",
    epilog=example(
        "dspark convert embedded --to speculators runs/for-vllm",
        "dspark convert embedded --to gguf draft.gguf --type f16",
        "dspark convert embedded --to sglang runs/for-sglang --expand",
        "dspark convert draft.gguf --to native runs/back",
    ),
)(convert_command)
app.command(
    "doctor",
    epilog=example(
        "dspark doctor",
        "dspark doctor --target embedded --draft embedded",
        "dspark doctor --draft runs/mine/best --engine vllm --profile vllm.json",
        "dspark doctor --draft embedded --engine llamacpp --engine-python VENV/bin/python",
    ),
)(doctor_command)
app.command("serve", epilog=example("dspark serve --port 8000 --memory 2GiB"))(serve_command)
app.command(
    "card",
    epilog=example(
        "dspark card runs/mine/best --report runs/ab/report.json --license mit --repo me/my-draft",
        "dspark card runs/rows.jsonl --sample 3",
    ),
)(card_command)
app.command(
    "publish",
    epilog=example(
        "dspark publish runs/mine/best --repo me/my-draft", "dspark publish runs/mine/best --repo me/my-draft --push"
    ),
)(publish_command)
app.command(
    "launch",
    epilog=example(
        "dspark launch vllm kimi-k2.7-code --dry-run",
        "dspark launch sglang --target org/model --draft runs/mine/best --tp 8",
        "dspark launch llamacpp --target model.gguf --draft runs/mine/best --context 8192",
        """dspark launch vllm kimi-k2.6 --flag speculative-config='{"attention_backend": "TRITON_ATTN"}'""",
    ),
)(launch_command)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line. Bad input is one line on stderr and exit code 2.

    A termination signal ends a command as Ctrl-C does (also where the shell had it ignored): what can be resumed
    afterwards is written out first.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except DsparkError as error:
        _refuse(error)
    except RecursionError:
        _refuse(DsparkError("input", "a file or option", "is nested too deeply"))
    except OSError as error:
        _refuse(DsparkError("file", error.filename, f"{error.strerror or error}; check the path and the free space"))


def _refuse(error: DsparkError) -> NoReturn:
    errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
