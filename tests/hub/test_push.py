"""What titans-hf train publishes: the card, and the files of a push."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from common import make_config
from huggingface_hub import ModelCard, get_token
from test_remote_code import CODE, assert_brings_its_code, run_alone
from tiny_run import LLAMA, SHORT, TITANS

from titans_hf.cli import train
from titans_hf.cli.training.checkpoints import RECORD
from titans_hf.cli.training.model_card import PROCEDURE, fill_card

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")
FILES = CODE | {"config.json", "model.safetensors", "tokenizer.json"}


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def pushes(monkeypatch):
    """The uploads in order: {name of the file: its content at the time}."""
    uploads = []

    def upload(*args, add_operations=None, operations=None, **kwargs):
        added = operations if add_operations is None else add_operations
        uploads.append({file.path_in_repo: Path(file.path_or_fileobj).read_bytes() for file in added})

    def create_repo(api, name, **kwargs):
        return SimpleNamespace(repo_id=f"someone/{name}")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    monkeypatch.setattr("huggingface_hub.HfApi._validate_yaml", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub._upload_pipeline.pipelined_upload", upload)
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", upload)  # where hf_xet is not installed
    return uploads


def test_a_push_uploads_the_run_without_its_checkpoints(options, tmp_path, pushes):
    """Every push has code, configuration and tokenizer; the last has the run's files but checkpoints and _names."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_notes.txt").write_text("not for others")
    train.main(options(TITANS, push_to_hub="true", **SHORT | dict(max_steps=4)))
    assert len(pushes) > 1 and all(push.keys() >= FILES for push in pushes)
    assert list((tmp_path / "out").glob("checkpoint-*"))
    published = {name: data for name, data in files(tmp_path / "out").items() if not name.startswith(("check", "_"))}
    assert published == pushes[-1]
    assert ModelCard(pushes[-1]["README.md"].decode()).data.model_name == "out"
    assert "someone/out" in pushes[-1]["README.md"].decode()


def test_the_folder_of_a_run(options, tmp_path, texts):
    """The card has the run's figures, and the folder its code."""
    folder = tmp_path / "out"
    changes = dict(license="cc-by-4.0", eval_data=texts / "c.txt", hub_model_id="someone/small")
    metrics = train.main(options(TITANS, **SHORT, **changes))
    assert_brings_its_code(folder)
    card = ModelCard.load(folder / "README.md")
    assert "More information needed" not in card.text
    assert (card.data.license, card.data.library_name, card.data.model_name) == ("cc-by-4.0", "transformers", "small")
    assert card.data.tags == ["titans", "mag"] and card.data.pipeline_tag == "text-generation"
    record = json.loads((folder / "run.json").read_text())
    for text in (
        f"| parameters | {record['parameters']:,} |",
        "| window | 16 |",
        "- learning_rate: 0.01",
        f"From scratch on texts: {record['tokens_seen']:,} tokens in 2 steps, in blocks of 32.",
        f"Evaluated on c.txt, {record['eval_tokens']:,} tokens: nats per token {metrics['eval_loss']:.4f}, ",
        'from_pretrained("someone/small", trust_remote_code=True)',
        f"nats per token with the memory off {metrics['eval_loss_memory_off']:.4f}",
        "![Losses by step](losses.png)",
        "do_sample=True",
        "Weights: cc-by-4.0.",
    ):
        assert text in card.text, text
    assert "segment" not in card.text
    assert str(tmp_path) not in card.content


HOSTILE = "a\n---\nb: *c* | [d](e) <f> `g` $h$ _{i\r\n# j"
SHOWN = r"a --- b: \*c\* \| \[d\](e) \<f\> \`g\` \$h\$ \_\{i \# j"


def test_names_that_are_markup(options, tmp_path):
    """A name is shown literally, on one line; with quotes it stays one string of the examples."""
    train.main(options(TITANS, **SHORT))
    record = json.loads((tmp_path / "out" / RECORD).read_text()) | {"license": "mit"}

    def card(**changes) -> ModelCard:
        made = ModelCard(f"---\nlibrary_name: transformers\n---\n# draft\n\n{PROCEDURE}\n\nby Trainer\n")
        return fill_card(made, make_config("mag"), record | changes)

    for field in ("license", "name", "train_data", "eval_data"):
        hostile = ModelCard(card(**{field: HOSTILE}).content)
        assert len(hostile.text.splitlines()) == len(card().text.splitlines()) and SHOWN in hostile.text
        assert hostile.text.endswith(f"{PROCEDURE}\n\nby Trainer\n") and "draft" not in hostile.text
    text = card(name='x" + exit() + "; rm y').text
    assert 'from_pretrained("x\\" + exit() + \\"; rm y", trust' in text
    assert "serve 'x\" + exit() + \"; rm y'\n" in text


@pytest.mark.parametrize("model", [TITANS, LLAMA], ids=lambda model: model["model_type"])
def test_what_is_not_told(options, tmp_path, monkeypatch, model):
    """A card without a licence says so, a baseline's is Trainer's own, and a --hub_token is in no file."""
    monkeypatch.setenv("HF_TOKEN", "another")
    train.main(options(model, hub_token="hf_secret", **SHORT))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license is None
    for text in ("Weights: not stated", "Evaluated on texts (held out)", "Titans", "trust_remote_code"):
        assert (text in card.content) is (model is TITANS), text
    assert get_token() == "hf_secret"
    assert not [name for name, data in files(tmp_path / "out").items() if b"hf_secret" in data]


@pytest.mark.slow
def test_the_card_tells_how_to_load_it(options, tmp_path):
    """The card's code runs unchanged with the pushed files on the Hub, by their own code."""
    train.main(options(TITANS, hub_model_id="someone/small", **SHORT))
    pushed, commit = tmp_path / "hub" / "models--someone--small", 40 * "a"
    shutil.copytree(tmp_path / "out", pushed / "snapshots" / commit)
    (pushed / "refs").mkdir()
    (pushed / "refs" / "main").write_text(commit)
    (program,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    text = run_alone(f"{program}\nimport sys; assert 'titans_hf' not in sys.modules", tmp_path)
    assert text.startswith("It was a dark night, and")
