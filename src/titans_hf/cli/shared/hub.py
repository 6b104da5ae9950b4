"""Names on the Hub, on a machine that may have no network."""

from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session, httpx

SECONDS = 10.0  # until an answer of the Hub


def go_offline_without_network(name: str | Path) -> None:
    """Turns Hugging Face's offline mode on if `name` is not a path on this machine and the Hub does not answer.

    A name then comes from the cache or fails at once. Otherwise every request would be repeated for half a minute.
    """
    if Path(name).exists() or constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except (httpx.HTTPError, OfflineModeIsEnabled):
        constants.HF_HUB_OFFLINE = True
