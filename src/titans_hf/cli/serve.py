"""Runs transformers' own command line for Titans checkpoints too: `serve PATH --memory DIR` and `chat PATH URL`."""

import sys
from importlib.util import find_spec

from huggingface_hub.utils import httpx
from transformers import AutoModelForCausalLM
from transformers.cli.transformers import app
from transformers.cli.transformers import main as transformers_main
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from titans_hf import TitansConfig, TitansForCausalLM

for _package in ("accelerate", "fastapi", "openai", "uvicorn"):  # transformers would notice late that one is missing
    if find_spec(_package) is None:
        raise ModuleNotFoundError(name=_package)


def main() -> None:
    """Runs the command in `sys.argv`. Raises ValueError for --continuous-batching, which Titans does not support, and
    for a chat with a model that the server cannot load; ConnectionError if a chat gets no answer.
    """
    if "--continuous-batching" in sys.argv:  # every request would fail
        try:
            TitansForCausalLM.init_continuous_batching(None)
        except NotImplementedError as error:
            raise ValueError(f"--continuous-batching: {error}") from error
    # The server looks the class of a checkpoint up in the module `transformers`, which transformers may have replaced
    # since it was imported, and lists the downloaded models whose type is in the mapping.
    sys.modules["transformers"].TitansForCausalLM = TitansForCausalLM
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TitansConfig.model_type] = TitansForCausalLM.__name__
    sys.modules["transformers"].RememberForCausalLM = AutoModelForCausalLM  # loads the base model, with its memory
    if sys.argv[1] == "serve":
        from titans_hf.cli.serving.server import extend

        extend(app.commands["serve"])
    try:
        transformers_main()
    except (httpx.HTTPError, ValueError) as error:
        cause = (
            error if isinstance(error, httpx.HTTPError) else error.__context__
        )  # the ValueError names its own server
        if not isinstance(cause, httpx.HTTPError):
            raise
        raise ConnectionError(f"the server does not answer: {cause}. titans-hf serve MODEL starts one") from error
    except RuntimeError as error:
        if sys.argv[1] != "chat":
            raise
        raise ValueError(f"the server cannot load the model: {error}") from error
