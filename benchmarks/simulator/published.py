"""What was published beside what is simulated, as the tables of docs/simulator.md.

python benchmarks/simulator/published.py            the shipped cards
python benchmarks/simulator/published.py --fit      fitted anew on the rows without speculation and with k = 3
"""

from __future__ import annotations

import argparse

from paceline.sim.published import BAR, Cards, Published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    published, cards = Published(), Cards.shipped()
    if given.fit:
        cards, found = published.fit(cards)
        print(f"fitted rows: off by {100 * found.mean:.1f}% on average, {100 * found.worst:.1f}% at most\n")
        for name, value in found.values.items():
            print(f"    {name} = {value:.4g}")
    table = ""
    for row in published.rows:
        if row.table != table:
            table = row.table
            print(f"\n**{table}**\n\n| | published | simulated | off | |\n|---|---|---|---|---|")
        text = f"{row.published:g}" if row.high is None else f"{row.published:g} – {row.high:g}"
        error = row.error(cards)
        what = [word for word, said in (("fitted", row.fitted), ("no bar", not row.bar)) if said]
        if row.bar and abs(error) > BAR:
            what.append("BEYOND THE BAR")
        print(f"| {row.name} | {text} | {row.simulated(cards):.2f} | {100 * error:+.1f}% | {', '.join(what)} |")


if __name__ == "__main__":
    main()
