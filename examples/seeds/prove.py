# SPDX-License-Identifier: Apache-2.0
"""Prove what docs/reproducibility.md and docs/resume.md claim, sentence by sentence.

Prints what was compared, and digests of its bits. The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proof import Proof

PARTS = ("of_loaders", "of_seeding", "of_resuming")
TABLE = "| | claim | what was compared | |\n|---|---|---|---|"
VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "not compared"}


def main() -> int:
    # Not at the top: a worker that is spawned imports this file, and needs none of it.
    from proof import CLAIMS, Proof, Size

    for name in PARTS:
        importlib.import_module(name)  # enters its claims

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples and workers")
    parser.add_argument("--markdown", action="store_true", help="a table, as in the README")
    arguments = parser.parse_args()
    size = Size(48, (0, 2)) if arguments.quick else Size(240, (0, 1, 2, 4))
    form = "| {} | {} | {} | {} |" if arguments.markdown else "{:>2}. {}\n    {}: {}"
    started, page = time.perf_counter(), ""
    proofs = []
    for number, claim in enumerate(CLAIMS, start=1):
        if claim.page != page:
            page = claim.page
            print(f"\n### docs/{page}\n\n{TABLE}" if arguments.markdown else f"docs/{page}")
        try:
            proof = claim.check(size)
        except Exception as error:  # that it cannot be shown is a result, too
            proof = Proof(f"{type(error).__name__}: {error}", False)
        proofs.append(proof)
        print(form.format(number, claim.text, proof.told, VERDICTS[proof.holds]), flush=True)
    if not arguments.markdown:
        print(f"{summary(proofs)}, in {time.perf_counter() - started:.0f} s")
    return int(any(proof.holds is False for proof in proofs))


def summary(proofs: list[Proof]) -> str:
    """Count the verdicts, and say why something was not compared."""
    counts = Counter(proof.holds for proof in proofs)
    reasons = "; ".join(sorted({proof.told for proof in proofs if proof.holds is None}))
    left_out = f", {counts[None]} not compared ({reasons})" if reasons else ""
    return f"{counts[True]} hold, {counts[False]} do not{left_out}"


def expect_disturbances() -> None:
    """More workers than cores, and a killed worker that is replaced, are meant here."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    logging.getLogger("penstock").setLevel(logging.ERROR)


if __name__ == "__main__":
    expect_disturbances()
    raise SystemExit(main())
