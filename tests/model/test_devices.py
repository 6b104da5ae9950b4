"""cli/shared/devices.py: the device of a command."""

import pytest
import torch

from titans_hf.cli.shared.devices import choose_device


def test_a_device_is_chosen():
    """A name gives its device, and none the GPU if there is one."""
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["nonsense", "cuda:99"])
def test_missing_devices_are_named(name):
    """A device that is not there raises an error that names it."""
    with pytest.raises(ValueError, match=f"--device {name} cannot be used: "):
        choose_device(name)
