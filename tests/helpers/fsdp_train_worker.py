"""Runs titans-hf train under `accelerate launch` with FSDP on CPU, where Accelerate would use DDP instead."""

import os
import sys

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from titans_hf.cli import train

plain_init = AcceleratorState.__init__


def init_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    plain_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin


def main() -> None:
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    AcceleratorState.__init__ = init_with_fsdp
    # A property counts more than what Accelerate writes into the state.
    AcceleratorState.distributed_type = property(lambda self: DistributedType.FSDP, lambda self, value: None)
    train.main(sys.argv[1:])


if __name__ == "__main__":
    main()
