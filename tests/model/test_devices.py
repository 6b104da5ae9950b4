"""cli/shared/devices.py: the device of a command."""

import pytest

from titans_hf.cli.shared.devices import choose_device


@pytest.mark.parametrize("name", ["nonsense", "cuda:99"])
def test_missing_devices_are_named(name):
    """A device that is not there raises an error that names it."""
    with pytest.raises(ValueError, match=f"--device {name} cannot be used: "):
        choose_device(name)
