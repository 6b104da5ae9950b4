"""Local tasks against lm-eval's own: same requests, same scores, documents made from the files equal to the Hub's."""

import pytest
from covering import in_one_test
from datasets import Dataset

from titans_hf.cli.training.tokenizer import byte_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")
from eval_common import BOOK, EVAL, SHARED, RuleLM, make_data, needs_shared_data
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.ruler import common_utils as ruler

from titans_hf.cli.evaluation.tasks.local_task import OFFICIAL

# The items of make_data as the Hub's data sets have them.
ARC = [
    {"id": "x", "question": "Why?", "choices": {"text": ["so", "not so"], "label": ["A", "B"]}, "answerKey": "B"},
    {"id": "y", "question": "Who?", "choices": {"text": ["me", "you", "they"], "label": list("ABC")}, "answerKey": "A"},
]
WIKITEXT = [" = A = \n \n first , Quux \n \n = = B = = \n \n x @-@ y \n ", " = C = \n \n z . \n \n"]
HUB = {
    "piqa_local": (
        "piqa/piqa.yaml",
        [{"goal": "g", "sol1": "a", "sol2": "b", "label": 1}, {"goal": "h?", "sol1": "c d", "sol2": "e", "label": 0}],
    ),
    "hellaswag_local": (
        "hellaswag/hellaswag.yaml",
        [
            {
                "activity_label": "Canoeing",
                "ctx_a": "Two sit in a boat.",
                "ctx_b": "the man",
                "endings": ["rows.", "sinks fast.", "sings.", "stops."],
                "label": "2",
            },
            {
                "activity_label": "Youth",
                "ctx_a": '[header] How to eat [title] Sit. [step] Eat "well".',
                "ctx_b": "",
                "endings": ["Do.", "Don't.", "Wait [title] Then eat.", "No [substeps] more."],
                "label": "0",
            },
        ],
    ),
    "winogrande_local": (
        "winogrande/default.yaml",
        [{"sentence": "Ann gave Bea _ keys.", "option1": "Ann", "option2": "Bea", "answer": "2"}],
    ),
    "boolq_local": (
        "super_glue/boolq/default.yaml",
        [{"question": "is it", "passage": "It is.", "idx": 0, "label": 1}],
    ),
    "arc_easy_local": ("arc/arc_easy.yaml", ARC),
    "arc_challenge_local": ("arc/arc_challenge.yaml", ARC),
    "lambada_openai_local": (
        "lambada/lambada_openai.yaml",
        [{"text": "He saw a dog"}, {"text": 'one two "three" four'}],
    ),
    "wikitext_local": ("wikitext/wikitext.yaml", [{"page": page} for page in WIKITEXT]),
    "wikitext_whole": ("wikitext/wikitext.yaml", [{"page": "\n".join(WIKITEXT)}]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def local_task(name, data, **metadata):
    manager = TaskManager(
        include_path=str(EVAL / "tasks"), include_defaults=False, metadata={"data": str(data)} | metadata
    )
    return manager.load([name])["tasks"][name]


def official_task(path, rows, resolve=True, **changes):
    config = load_yaml(OFFICIAL / path, resolve_func=resolve)
    split = "test" if config.get("test_split") else "validation"
    others = {f"{name}_split": None for name in ("training", "validation", "test") if name != split}
    return ConfigurableTask(
        config=config | others | {"custom_dataset": lambda **_: {split: Dataset.from_list(rows)}} | changes
    )


def requests(task):
    task.set_config("num_fewshot", task.get_config("num_fewshot") or 0)
    task.build_all_requests(rank=0, world_size=1)
    return [(instance.request_type, instance.args) for instance in task.instances]


def scores(task):
    no_index = TaskManager(include_defaults=False)
    results = simple_evaluate(RuleLM(), tasks=[task], task_manager=no_index, bootstrap_iters=0)
    (found,) = results["results"].values()
    return {name: value for name, value in found.items() if name not in ("alias", "name")}


@pytest.mark.parametrize("name", HUB)
def test_requests_and_scores_are_those_of_lm_eval(data, name):
    """Requests and scores of a local task equal the official task's."""
    path, rows = HUB[name]
    assert requests(local_task(name, data)) == requests(official_task(path, rows))
    ours = scores(local_task(name, data))
    assert ours == scores(official_task(path, rows))
    assert any("," in metric for metric in ours)


@pytest.mark.parametrize("name", ["niah_single_1_local", "niah_single_2_books", "niah_single_3_books"])
def test_needles_are_asked_and_scored_as_by_lm_eval(data, tokenizer, name):
    """Requests and scores of needles equal RULER's in lm-eval."""
    ours = local_task(name, data, tokenizer=tokenizer, max_seq_lengths=[4096], samples=6)
    metrics = [{"metric": "4096", "aggregation": ruler.aggregate_metrics, "higher_is_better": True}]
    changes = {"process_results": ruler.process_results, "metric_list": metrics}
    theirs = official_task("ruler/niah_single_1.yaml", list(ours.task_docs), resolve=False, **changes)
    assert requests(ours) == requests(theirs)
    assert scores(ours)["acc,none"] == scores(theirs)["4096,none"] == 0.5


def test_babilong_is_asked_with_its_description_and_examples(data, tokenizer):
    """Prompts start with BABILong's description and examples and end with the question."""
    task = local_task("babilong_qa1_books", data, tokenizer=tokenizer, max_seq_lengths=0)
    (_, (prompt, options)), *others = requests(task)
    assert len(others) == 2
    assert prompt.startswith("I will give you context with the facts about positions of different persons")
    assert "Where is Charlie? The most recent location of Charlie is balcony.\n\n" in prompt
    assert prompt.endswith("\n\nMary went to the hall. John ran to the garden.\nWhere is Mary?")
    assert options["max_gen_toks"] == 16
    assert scores(task)["acc,none"] == pytest.approx(1 / 3)  # RuleLM always answers "hall"


def test_babilong_shares_its_book_with_the_needles(data, tokenizer):
    """BABILong fills its lengths with sentences of the books, as the needles do."""
    task = local_task("babilong_qa2_books", data, tokenizer=tokenizer, max_seq_lengths=1024, samples=2)
    assert len(task.task_docs) == 2
    for doc in task.task_docs:
        assert 1024 - 60 < len(doc["input"]) <= 1024
        assert all(f" {word} " in f" {BOOK} " for word in doc["input"].split() if word in ("Darcy", "Nobody"))


def test_the_whole_file_can_be_limited_to_its_first_articles(data):
    """`samples` limits wikitext_whole to the first articles."""
    (page,) = local_task("wikitext_whole", data, samples=1).task_docs["page"]
    assert page == WIKITEXT[0]


def test_a_task_without_a_folder_says_what_to_pass():
    """A local task without its folder raises an error that names --metadata."""
    manager = TaskManager(include_path=str(EVAL / "tasks"), include_defaults=False)
    with pytest.raises(ValueError, match="name it in --metadata"):
        manager.load(["piqa_local"])


def test_a_missing_file_is_named(tmp_path):
    """A missing data file raises an error that names it."""
    with pytest.raises(FileNotFoundError, match=r"holds no lambada/lambada_test.jsonl"):
        local_task("lambada_openai_local", tmp_path)


@needs_shared_data
@in_one_test(
    "name,number",
    {
        "piqa_local": 1838,
        "hellaswag_local": 10042,
        "winogrande_local": 1267,
        "boolq_local": 3270,
        "arc_easy_local": 2376,
        "arc_challenge_local": 1172,
        "lambada_openai_local": 5153,
        "wikitext_local": 62,
    }.items(),
)
def test_the_shared_data_has_all_documents(name, number):
    """The data have as many documents as the published sets."""
    assert len(local_task(name, SHARED).task_docs) == number


@needs_shared_data
def test_wikitext_has_its_blank_lines_and_words():
    """WikiText's pages have the published layout and number of words."""
    pages = local_task("wikitext_local", SHARED).task_docs["page"]
    assert pages[0].startswith(" = Robert Boulter = \n \n Robert Boulter is an English film ,")
    assert pages[1].startswith(" = Du Fu = \n \n ")
    assert sum(len(page.split()) for page in pages) == 241211  # as published, <eos> not counted


@needs_shared_data
def test_hellaswag_begins_the_unfinished_sentence_with_a_capital():
    """HellaSwag's contexts continue with a capital letter as in lm-eval."""
    queries = local_task("hellaswag_local", SHARED).task_docs["query"]
    assert queries[0] == "Roof shingle removal: A man is sitting on a roof. He"
    assert queries[1].endswith("She bends down and grabs the pole. The lady")
    unfinished = [query for query in queries if query[-1] not in ".!?\"')"]
    assert len(unfinished) > 3200
    assert sum(query[0].isupper() for query in queries) == len(queries)
