"""bertrain push, through huggingface_hub itself, to a hub on a port of this machine."""

import base64
import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import helpers
import pytest
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertrain.commands import push

PAGE = (Path(__file__).parent.parent / "docs" / "records.md").read_text()
SENT = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
TOKEN = "hf_secret"


class Hub(helpers.Handler):
    """A hub with one repository, org/name. It takes every file as a part of the commit itself."""

    private = None  # None: there is no repository
    refuses = None  # the status of its answers

    def reply(self, content, status=200):
        self.answer(status, json.dumps(content).encode())

    def do_GET(self):
        hub = type(self)
        hub.asked.append(self.path)
        status = hub.refuses if hub.refuses != 403 else 200  # who may not write may read
        self.reply({"id": "org/name", "private": hub.private, "sha": "a" * 40}, status or 200)

    def do_POST(self):
        hub, body = type(self), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        hub.asked.append(path)
        if hub.refuses or self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.reply({"error": f"no, {self.headers['Authorization']}"}, hub.refuses or 401)
        elif path == "/api/repos/create":
            is_there, hub.private = hub.private is not None, hub.private
            if not is_there:
                hub.private = json.loads(body).get("visibility", "") == "private" or json.loads(body).get("private")
            self.reply({"url": f"{hub.url}/org/name"}, 409 if is_there else 200)
        elif path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            self.reply({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif path.endswith("/commit/main"):
            values = [each["value"] for each in map(json.loads, body.splitlines()) if each["key"] == "file"]
            hub.commits.append({value["path"]: base64.b64decode(value["content"]) for value in values})
            self.reply({"success": True, "commitOid": "b" * 40, "commitUrl": f"{hub.url}/org/name/commit/b"})
        else:
            self.reply({"errors": [], "warnings": []})  # of the card's first lines


@pytest.fixture
def hub(monkeypatch):
    class Made(Hub):
        commits, asked = [], []

    with helpers.serving(Made) as address:
        Made.url = f"http://{address}"
        monkeypatch.setattr(constants, "ENDPOINT", Made.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", Made.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield Made


@pytest.fixture(scope="module")
def run(bert_run, tmp_path_factory):
    """A run of two steps, with a file that is not its own. Tests must not change it."""
    out = tmp_path_factory.mktemp("push") / "run"
    shutil.copytree(bert_run, out)
    (out / "step-00000002" / "notes.txt").write_text("nobody else's business")
    return out


def call(*words):
    result = helpers.succeeds(push.main, *words)
    assert TOKEN not in result.output
    return result


def refused(*words, kind, option=None):
    refusal = helpers.refused(push.main, *words, kind=kind, option=option)
    assert TOKEN not in refusal.sentence
    return refusal


def test_the_newest_checkpoint_is_sent_without_the_state_of_the_training(hub, run, tmp_path):
    result = call(run, "org/name")
    assert (hub.private, len(hub.commits)) == (True, 1)
    (sent,) = hub.commits
    directory = run / "step-00000002"
    assert sorted(sent) == SENT
    assert all(sent[name] == (directory / name).read_bytes() for name in SENT[1:])
    for name in SENT:
        assert re.search(rf"{(directory / name).stat().st_size:,} bytes  {name}$", result.stdout, re.MULTILINE)
    assert ": checkpoint.json, optimizer.pt, trainer.json\n" in result.stdout
    assert str(directory / "README.md") in result.stderr  # which names no license
    assert result.stdout.splitlines()[-1] == f"{hub.url}/org/name/commit/b"
    for name, content in sent.items():
        (tmp_path / name).write_bytes(content)
    AutoModelForMaskedLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)


def test_the_card_names_the_repository_and_is_else_as_it_was(hub, run):
    call(run / "step-00000001", "org/name")
    text, before = hub.commits[0]["README.md"].decode(), (run / "step-00000001" / "README.md").read_text()
    lines = zip(text.splitlines(), before.splitlines(), strict=True)
    assert all("org/name" in line for line, was in lines if line != was)
    assert ModelCard(text).text.lstrip().startswith("# org/name\n")
    for line in ('from_pretrained("org/name")', "--init org/name --data", "--checkpoint org/name --train"):
        assert line in text


def test_a_dry_run_lists_the_files_and_asks_nobody(hub, run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    result = call(run, "org/name", "--dry-run")
    assert re.findall(r"bytes  (\S+)$", result.stdout, re.MULTILINE) == SENT
    assert hub.asked == []


def test_only_public_lets_everybody_see_a_model(hub, run):
    hub.private = False
    refused(run, "org/name", kind="missing", option="public")
    assert hub.commits == []
    call(run, "org/name", "--public")
    assert len(hub.commits) == 1


def test_a_fine_tuned_model_is_sent_without_what_lies_beside_it(hub, run, tmp_path):
    tuned = tmp_path / "cola" / "seed-0"
    shutil.copytree(run / "step-00000002", tuned)
    for name in ("checkpoint.json", "optimizer.pt", "trainer.json"):
        (tuned / name).unlink()
    (tuned / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    (tuned / "seed.json").write_text('{"of": {"--checkpoint": "/home/me/secret"}}')
    result = call(tuned, "org/name")
    assert sorted(hub.commits[0]) == SENT
    assert result.stderr == ""
    for parent in (tuned.parent, tuned.parent.parent):  # of a fine-tuning, and of a suite
        assert str(tuned) in refused(parent, "org/name", kind="not-a-run", option="checkpoint").sentence
    (tuned / "README.md").unlink()
    assert "README.md" in call(tuned, "org/name", "--dry-run").stderr
    (tuned / "model.safetensors").rename(tuned / "pytorch_model.bin")
    refused(tuned, "org/name", kind="weights-missing", option="checkpoint")


def test_what_the_hub_refuses_is_one_sentence_without_the_token(hub, run):
    hub.private = True
    refused_with = {401: "access-denied", 403: "access-denied", 404: "not-found", 422: "server-unsuitable",
                    503: "server-failed"}  # fmt: skip
    for hub.refuses, kind in refused_with.items():
        refused(run, "org/name", kind=kind, option="repository" if hub.refuses in (403, 422) else None)
    assert hub.commits == []


def test_without_a_hub_or_a_token_nothing_is_sent(hub, run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "hf://org/name" in refused(run, "org/name", kind="server-failed").sentence
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(run, "org/name", kind="access-denied").sentence
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "none"))
    refused(run, "org/name", kind="access-denied")


def test_what_is_no_complete_checkpoint_or_no_name_is_refused(hub, run, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "org/name", kind="not-a-run", option="checkpoint")
    shutil.copytree(run, tmp_path / "run")
    for directory in (tmp_path / "run").glob("step-*"):
        (directory / "model.safetensors").write_bytes(b"damaged")
    refused(tmp_path / "run", "org/name", kind="damaged", option="checkpoint")
    for name in ("name", "a/b/c", "org/na me", "org/-name"):
        assert refused(run, name, kind="malformed", option="repository").given == name
    assert hub.commits == []


@pytest.mark.parametrize("name", ["README.md", "notes.json", "config.json"])
def test_what_a_link_leads_to_is_not_sent(hub, run, tmp_path, name):
    directory = shutil.copytree(run / "step-00000002", tmp_path / "model")
    if name != "README.md":
        (directory / "checkpoint.json").unlink()
    (tmp_path / "secret").write_bytes((directory / "config.json").read_bytes())
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "secret")
    assert refused(directory, "org/name", kind="wrong-file-type", option="checkpoint").given == str(directory / name)
    assert hub.commits == []


def test_no_name_in_checkpoint_json_leads_out_of_the_directory(hub, run, tmp_path):
    directory = shutil.copytree(run / "step-00000002", tmp_path / "model")
    secret, index = tmp_path / "secret", directory / "checkpoint.json"
    secret.write_bytes(b"known")
    known = {"bytes": 5, "sha256": hashlib.sha256(b"known").hexdigest()}
    stated = json.loads(index.read_bytes())["files"]
    for name in ("../secret", str(secret)):
        index.write_text(json.dumps({"files": stated | {name: known}}))
        refused(directory, "org/name", kind="wrong-file-type", option="checkpoint")
    assert hub.commits == []


def test_the_commands_of_the_page_run(hub, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    lines = re.findall(r"^    bertrain push (.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        call(*shlex.split(line, comments=True))
    assert len(hub.commits) == 1
