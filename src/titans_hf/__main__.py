"""Runs Transformers' command line with Titans registered: `python -m titans_hf serve PATH`, `... chat PATH URL`."""

import sys

from transformers.cli.transformers import main as transformers_main
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import TitansConfig, TitansForCausalLM


def main() -> None:
    if "--continuous-batching" in sys.argv:  # fail now: otherwise every request would
        try:
            TitansForCausalLM.init_continuous_batching(None)
        except NotImplementedError as error:
            sys.exit(f"--continuous-batching: {error}")
    # The server looks up the class of a checkpoint on the transformers module (in sys.modules: Transformers replaces
    # the module object while it is imported), and lists only downloaded models whose type is in the map.
    sys.modules["transformers"].TitansForCausalLM = TitansForCausalLM
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TitansConfig.model_type] = TitansForCausalLM.__name__
    transformers_main()


if __name__ == "__main__":
    main()
