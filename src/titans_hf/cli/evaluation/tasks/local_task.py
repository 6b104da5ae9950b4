"""A task of lm-eval on data of another place."""

from pathlib import Path

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

OFFICIAL = Path(lm_eval.tasks.__file__).parent


class LocalTask(ConfigurableTask):
    """Prompts, targets, metrics and processing of the YAML file `official` among lm-eval's tasks, which a YAML file's
    `include` cannot name because it does not know where lm-eval is installed. Keys beside `official` win.

    Only the splits that the data has are declared, so that none is looked for to draw few-shot examples from.
    """

    def __init__(self, config: dict):
        settings = load_yaml(OFFICIAL / config["official"]) | config
        for key in ("official", "class", "tag"):
            settings.pop(key, None)
        super().__init__(config=settings)

    def download(self, dataset_kwargs: dict | None = None, **kwargs) -> None:
        super().download(dataset_kwargs, **kwargs)
        for split in ("training", "validation", "test"):
            if getattr(self.config, f"{split}_split") not in self.dataset:
                setattr(self.config, f"{split}_split", None)
