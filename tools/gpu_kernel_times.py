#!/usr/bin/env python3
"""Time by kernel, from the CSV of `ncu --metrics gpu__time_duration.sum --csv`: number of launches,
total and mean, the longest total first."""

import csv
import sys
from collections import defaultdict

TO_US = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3}


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = [line for line in file if line.startswith('"')]
    times = defaultdict(list)
    for row in csv.DictReader(lines):
        value = float(row["Metric Value"].replace(",", ""))
        grid = f'{row.get("Grid Size", "")} {row.get("Block Size", "")}'
        times[row["Kernel Name"].split("(")[0][:90], grid].append(value * TO_US[row["Metric Unit"]])
    print(f"{sum(map(sum, times.values())) / 1e3:.2f} ms in {sum(map(len, times.values()))} launches")
    for (kernel, grid), us in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(us) / 1e3:9.3f} ms  {len(us):5} x {sum(us) / len(us):9.1f} us  {kernel}  {grid}")


if __name__ == "__main__":
    main()
