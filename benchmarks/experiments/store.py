"""Raw results on disk: a file for each experiment, a row for each of its runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

RESULTS = Path(__file__).parent / "results"
VERSIONS = {"jax": jax.__version__, "optax": optax.__version__}


class Store:
    """Rows that are written as they are made; one that is there is not made again.

    Raises:
        ValueError: where the file's rows were made with other settings, versions aside.
    """

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.settings = settings | {"versions": VERSIONS}
        self.rows: list[dict[str, Any]] = []
        if not path.is_file():
            return
        found = json.loads(path.read_text())
        for name, value in settings.items():
            if (before := found["settings"].get(name)) != value:
                raise ValueError(
                    f"{path} was made with {name} = {before}, not {value}: move it away to start "
                    "anew."
                )
        self.rows = found["runs"]

    def get(self, key: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row with this key; where there is none, the key and what `run` returns."""
        for row in self.rows:
            if all(row[name] == value for name, value in key.items()):
                return row
        row = key | run()
        self.rows.append(row)
        self._write()
        shown = {name: value for name, value in row.items() if isinstance(value, int | float | str)}
        print(f"{self.path.stem}: {shown}", flush=True)
        return row

    def _write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        rows = ",\n  ".join(map(json.dumps, self.rows))
        text = f'{{"settings": {json.dumps(self.settings)},\n "runs": [\n  {rows}\n ]}}\n'
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self.path)
