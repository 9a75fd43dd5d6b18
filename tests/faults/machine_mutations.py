"""The protections of `harness doctor`'s measurements: row 21, a machine that computes wrongly."""

from __future__ import annotations

from mutation import Mutation

MACHINE = (
    Mutation(
        21,
        "a product is compared with its exact result",
        "    places = (got != known.product.double()).nonzero()\n",
        "    places = (got != got).nonzero()\n",
        "tests/unit/measure/test_card_check.py -k flipped_bit",
    ),
    Mutation(
        21,
        "a cell of an address pattern is compared with its own number",
        "        for place, block in enumerate(blocks):\n            if pattern.of_address:\n"
        "                expected = pattern.values(place * cells, cells, device.place)\n"
        "            if wrong",
        "        for place, block in enumerate(blocks):\n            if pattern.of_address:\n"
        "                expected = device.read(block)\n"
        "            if wrong",
        "tests/unit/measure/test_card_check.py -k two_addresses",
    ),
    Mutation(
        21,
        "a repeated product is compared as bits",
        "        differs = (_as_bits(result) != _as_bits(product.first)).flatten()\n",
        "        differs = (_as_bits(result) != _as_bits(result)).flatten()\n",
        "tests/unit/measure/test_card_check.py -k changes_while",
    ),
    Mutation(
        21,
        "a candidate that did not train soundly is not taken",
        '    measured = [row for row in rows if row.status == "measured" and row.seconds]\n',
        "    measured = [row for row in rows if row.seconds]\n",
        "tests/unit/measure/test_speed.py -k did_not_train",
    ),
    Mutation(
        21,
        "a candidate whose loss was not finite is named",
        '    if contender.nonfinite and row.status == "measured":\n',
        "    if False:\n",
        "tests/unit/measure/test_speed.py -k is_not_finite",
    ),
)
