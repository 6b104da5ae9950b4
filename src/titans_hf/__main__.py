"""Transformers' own command line, for Titans checkpoints too: `python -m titans_hf serve PATH`, `... chat PATH URL`."""

import sys

from transformers.cli.transformers import main as transformers_main
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import TitansConfig, TitansForCausalLM
from .server_titans import extend_server


def main() -> None:
    if "--continuous-batching" in sys.argv:  # else every request would fail
        try:
            TitansForCausalLM.init_continuous_batching(None)
        except NotImplementedError as error:
            sys.exit(f"--continuous-batching: {error}")
    # The server looks the class of a checkpoint up on the module (the one there is by now: Transformers replaces it on
    # the way), and lists those of the downloaded models that are in the map.
    sys.modules["transformers"].TitansForCausalLM = TitansForCausalLM
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TitansConfig.model_type] = TitansForCausalLM.__name__
    extend_server()
    transformers_main()


if __name__ == "__main__":
    main()
