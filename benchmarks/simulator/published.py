"""Published results next to simulated ones: the errors in docs/how-to/simulator.md.

    python benchmarks/simulator/published.py            uses the shipped parameters
    python benchmarks/simulator/published.py --fit      fits the parameters again

The fit uses the rows without speculation and with k = 3.
"""

from __future__ import annotations

import argparse

from published_results import TOLERANCE, Parameters, PublishedResults, mean_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    published, parameters = PublishedResults(), Parameters.shipped()
    if args.fit:
        parameters, found = published.fit(parameters)
        print(f"fitted rows: error {100 * mean_error(found):.1f}% on average, {100 * found.max_error:.1f}% at most\n")
        for name, value in found.values.items():
            print(f"    {name} = {value:.4g}")
    table = ""
    for row in published.rows:
        if row.table != table:
            table = row.table
            print(f"\n**{table}**\n\n| | published | simulated | error | |\n|---|---|---|---|---|")
        text = f"{row.published:g}" if row.high is None else f"{row.published:g} – {row.high:g}"
        error = row.error(parameters)
        what = [label for label, applies in (("fitted", row.fitted), ("not checked", not row.checked)) if applies]
        if row.checked and abs(error) > TOLERANCE:
            what.append("ABOVE THE TOLERANCE")
        print(f"| {row.name} | {text} | {row.simulated(parameters):.2f} | {100 * error:+.1f}% | {', '.join(what)} |")


if __name__ == "__main__":
    main()
