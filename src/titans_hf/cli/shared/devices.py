"""Chooses the device that a command runs on."""

import torch


def choose_device(name: str | None) -> torch.device:
    """Returns the device of an option --device; without a name the GPU if there is one. Raises ValueError for a device
    that this machine does not have.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a device that this build of PyTorch lacks
        raise ValueError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return torch.device(name)
