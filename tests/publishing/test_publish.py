"""`dspark publish`: what is wrong with a folder, by name; what is listed; what goes over the wire."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file
from tests.publishing.hub import Hub
from tests.publishing.test_card import figures, trained, written

from dspark.checkpoints.native import CARD_FILE, TRAINING_FILE, weights_sha256
from dspark.errors import DsparkError
from dspark.publishing.card import card_of
from dspark.publishing.checks import faults, uploads
from dspark.publishing.publish import Publisher


@pytest.fixture
def folder(make_draft, tmp_path: Path) -> Path:
    """A draft that can go out."""
    place = trained(make_draft, tmp_path / "best", target_name="org/tiny")
    (place / CARD_FILE).write_text(card_of(place, licence="mit"))
    return place


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.stop()


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_dry_run_lists_every_file_and_sends_nothing(run, folder: Path) -> None:
    code, out, err = run("publish", folder, "--repo", "me/mine")
    assert code == 0, err
    *files, last = out.splitlines()
    assert [line.split()[-1] for line in files] == sorted(path.name for path in folder.iterdir())
    for line in files:
        digest, size, name = line.split()
        content = (folder / name).read_bytes()
        assert digest == hashlib.sha256(content).hexdigest() and int(size.replace(",", "")) == len(content)
    assert last.endswith("nothing was sent: --push sends them to me/mine")


def test_push_without_a_token_is_one_line(run, folder: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    code, _, err = run("publish", folder, "--repo", "me/mine", "--push")
    assert code == 2 and err == "error: push = 'me/mine': needs a token: set HF_TOKEN, or run `hf auth login`\n"


def test_the_figures_of_the_report_must_be_in_the_card(folder: Path, make_draft, tmp_path: Path) -> None:
    draft = make_draft(target_name="org/tiny")
    report = written(figures(weights_sha256(draft)), tmp_path / "report.json")
    assert faults(folder) == []
    assert "does not have the figures of" in faults(folder, report)[0]
    (folder / CARD_FILE).write_text(card_of(folder, report))
    assert faults(folder, report) == []
    with torch.no_grad():
        draft.norm.weight.mul_(2)
    written(figures(weights_sha256(draft)), report)
    with pytest.raises(DsparkError, match="holds figures of other weights"):
        faults(folder, report)


def test_every_fault_of_a_folder_is_named(folder: Path) -> None:
    for name in ("optimizer.pt", "README.md.tmp", "second.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text("{}")
    (folder / "inside").mkdir()
    (folder / "link.json").symlink_to(folder / "config.json")
    found = "\n".join(faults(folder))
    for words in (
        "optimizer.pt is no part of a draft",
        "README.md.tmp is no part of a draft",
        "second.safetensors: a published draft has one",
        "model.safetensors.index.json: a published draft has one",
        "inside is no plain file",
        "link.json is no plain file",
    ):
        assert words in found, words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {**t, "embed_tokens.weight": torch.zeros(30, 16)}, "target's weights (embed_tokens.weight)"),
        (lambda t: {**t, "lm_head.weight": torch.zeros(30, 16)}, "target's weights (lm_head.weight)"),
        (lambda t: {name: one for name, one in t.items() if name != "fc.weight"}, "missing fc.weight"),
        (lambda t: {**t, "fc.weight": t["fc.weight"] * float("nan")}, "must be finite"),
    ],
)
def test_tensors(folder: Path, change, words: str) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
    assert any(words in line for line in faults(folder)), faults(folder)


def test_the_card(folder: Path) -> None:
    path = folder / CARD_FILE
    text = path.read_text()
    for changed, words in (
        (text.replace("license: mit\n", ""), "names no licence"),
        (text.replace("| parameters | ", "| parameters | 1"), "does not have the parameters of config.json"),
        (text.replace("| predictions a block | 7", "| predictions a block | 8"), "does not have the gamma"),
        (text + "\nfrom /home/somebody/runs\n", "holds a path of this machine (/home/somebody/runs)"),
    ):
        assert changed != text
        path.write_text(changed)
        assert any(words in line for line in faults(folder)), words
    path.unlink()
    assert "README.md is missing" in faults(folder)[0]


def test_paths_of_this_machine(folder: Path) -> None:
    edit(folder / TRAINING_FILE, note="made in ~/runs/x")
    assert faults(folder) == ["training.json holds a path of this machine (~/runs/x); only names may stay"]
    edit(folder / TRAINING_FILE, note="and/or, https://host/home/page, 1/2", places=["/secret/place/of/rows"])
    assert faults(folder) == ["training.json holds a path of this machine (/secret/place/of/rows); only names may stay"]
    edit(folder / TRAINING_FILE, places=[])
    assert faults(folder) == []
    (folder / TRAINING_FILE).write_text("{")
    assert "training.json cannot be read" in faults(folder)[0]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "file:///home/me/x",
            "see //home/me/x",
            "a:/home/me/x",
            "/gpfs/u/x",
            "/nfs/u",
            "/raid/x",
            "/storage/x",
            "/lustre/x",
        ),
        *(
            "/content/drive",
            "/dev/shm/x",
            "/usr/local/lib",
            "C:\\Users\\me",
            "D:/rows",
            "\\\\server\\share\\x",
            "(~/runs)",
        ),
    ],
)
def test_paths_of_many_machines(folder: Path, text: str) -> None:
    edit(folder / TRAINING_FILE, note=f"from {text}")
    assert [line for line in faults(folder) if "training.json holds a path of this machine" in line]
    edit(folder / TRAINING_FILE, note="")
    (folder / "LICENSE").write_text(f"from {text}\n")
    assert [line for line in faults(folder) if "LICENSE holds a path of this machine" in line]


def test_addresses_and_names_are_no_paths(folder: Path) -> None:
    text = (
        "https://host/home/page, http://a.b:80/data/x?y=/tmp/z s3://bucket/data/x org/data, me/data/x a/b ./data/x "
        "../data/x 1/2 and/or <https://host/mnt/x> [it](https://host/usr/local/x) note: /v1/completions e.g. x:y "
        "task-force"
    )
    (folder / "notes.txt").write_text(text)
    edit(folder / TRAINING_FILE, note=text)
    assert faults(folder) == []


def test_tokens(folder: Path) -> None:
    for token in ("hf_" + "aB3" * 11, "sk-" + "proj-" + "x1" * 12):
        (folder / "NOTICE").write_text(f"token={token}\n")
        (found,) = faults(folder)
        assert "NOTICE holds an access token" in found and token not in found


def test_the_header_of_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "pt", "from": "/secret/place/x", "token": "hf_" + "aB3" * 11})
    assert [line.split(" (")[0] for line in faults(folder)] == [
        "model.safetensors holds a path of this machine",
        "model.safetensors holds an access token",
    ]


def test_other_files(folder: Path) -> None:
    for name, words in (
        ("LICENSE.pt", "is no part of a draft"),
        ("LICENSES", "is no part of a draft"),
        ("[a].txt", "rename it"),
        ("a*.json", "rename it"),
    ):
        (folder / name).write_text("{}")
        assert [line for line in faults(folder) if name in line and words in line], name
        (folder / name).unlink()
    for name in ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.txt"):
        (folder / name).write_text("Words.\n")
    assert faults(folder) == []
    (folder / "deep.json").write_text("[" * 100000)
    assert "deep.json cannot be read" in faults(folder)[0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("---\n", "\n---\n", "names no licence"),
        ("---\n", "\ufeff---\n", "names no licence"),
        ("license: mit", "license: ' '", "names no licence"),
        ("license: mit", "license: [mit]", "names no licence"),
        ("license: mit", "license: " + "[" * 3000, "names no licence"),
        ("| parameters |", "| parameters | 1 (x) |\n| parameters |", "does not have the parameters"),
        ("| parameters |", "|parameters| 1 |\n| parameters |", "does not have the parameters"),
        ("| predictions a block |", "<!-- | predictions a block |", "does not have the gamma"),
    ],
)
def test_the_card_is_read_as_it_is_seen(folder: Path, old: str, new: str, words: str) -> None:
    path = folder / CARD_FILE
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(words in line for line in faults(folder)), faults(folder)


def test_figures_in_a_comment_are_none(folder: Path, make_draft, tmp_path: Path) -> None:
    report = written(figures(weights_sha256(make_draft(target_name="org/tiny"))), tmp_path / "report.json")
    plain = card_of(folder)
    whole = card_of(folder, report)
    (folder / CARD_FILE).write_text(f"{plain}\n<!--\n{whole}\n-->\n")
    assert "does not have the figures of" in faults(folder, report)[0]


def test_the_card_has_a_name_that_the_hub_allows(run, folder: Path) -> None:
    code, out, err = run("card", folder, "--repo", "me/mi ne")
    assert (code, out) == (2, "") and err.startswith("error: repo = ") and err.count("\n") == 1


@pytest.mark.parametrize("repo", ["mine", "a/b/c", "me/..", "me/mi ne", ""])
def test_a_name_that_the_hub_does_not_allow(run, folder: Path, repo: str) -> None:
    code, out, err = run("publish", folder, "--repo", repo)
    assert (code, out) == (2, "") and err.startswith("error: repo = ") and err.count("\n") == 1


def test_a_folder_without_a_config(run, tmp_path: Path) -> None:
    code, out, err = run("publish", tmp_path, "--repo", "me/mine")
    assert (code, out) == (2, "") and "holds no config.json" in err


def test_faults_are_lines_and_exit_code_2(run, folder: Path) -> None:
    (folder / CARD_FILE).unlink()
    (folder / "state.pt").write_text("")
    code, out, err = run("publish", folder, "--repo", "me/mine", "--push")
    assert (code, out) == (2, "") and err.count("error: ") == err.count("\n") == 2


def test_the_upload_is_one_commit_of_exactly_these_files(folder: Path, hub: Hub, monkeypatch) -> None:
    """The hub's own client against a server on this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    files = uploads(folder)
    (folder / "later.txt").write_text("not checked, so not sent")
    url = Publisher(HfApi(endpoint=hub.url, token="hf_secret")).push(folder, files, "me/mine", private=True)
    assert url == f"{hub.url}/me/mine/commit/{'1' * 40}"
    assert [one["name"] for one in hub.created] == ["mine"] and hub.created[0]["organization"] == "me"
    assert hub.created[0]["visibility"] == "private"
    assert hub.commits == [{one.name: (folder / one.name).read_bytes() for one in files}]
    assert {hashlib.sha256(content).hexdigest() for content in hub.commits[0].values()} == {one.sha256 for one in files}
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_hub_that_refuses_or_is_not_there_is_one_line(folder: Path, hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.refuse = 403
    for url in (hub.url, "http://127.0.0.1:9"):
        with pytest.raises(DsparkError) as error:
            Publisher(HfApi(endpoint=url, token="hf_secret")).push(folder, uploads(folder), "me/mine", private=False)
        assert str(error.value).startswith("push = 'me/mine': failed: ") and "\n" not in str(error.value)
        assert "hf_secret" not in str(error.value)
    assert hub.commits == []


def test_a_target_that_nobody_else_has(make_draft, tmp_path: Path) -> None:
    place = trained(make_draft, tmp_path / "best", target_name="tiny")
    (place / CARD_FILE).write_text(card_of(place, licence="mit"))
    assert len(faults(place)) == 1 and "tiny" in faults(place)[0]
