"""The words of the generated knowledge bases. A name is a first and a last word; no word has two roles."""

from __future__ import annotations

PERSON_FIRST = tuple(
    "ada bruno carla dario edith felix greta hugo irene jonas klara leon mara nils olga paul quinn rosa simon "
    "tilda ugo vera wanda xaver yara zeno agnes boris celia doris emil frida".split()
)
PERSON_LAST = tuple(
    "abel brandt costa duval egger falk gruber hansen ibsen jansen keller lang moser novak orlov petri quast "
    "ritter sander thorne ulrich vogel weber xenos yates zander adler bauer conti diaz engel fischer".split()
)
PLACE_FIRST = tuple(
    "north south east west upper lower new old great little high deep long broad red green white black stony "
    "sandy misty sunny windy snowy royal holy far near inner outer salt iron".split()
)
PLACE_LAST = tuple(
    "bay bridge brook cape cliff creek dale falls field ford gate glen grove harbor haven heath hill hollow "
    "island lake marsh mill moor point port ridge rock shore spring valley wells wood".split()
)
WORK_FIRST = tuple(
    "silent golden broken hidden burning frozen crimson silver distant endless fallen gentle humble idle jagged "
    "kindly lonely modern nameless open pale quiet restless sacred tender uneven velvet amber yellow bitter "
    "common dusty".split()
)
WORK_LAST = tuple(
    "garden mirror river letter winter window journey lantern mountain orchard painter queen road sailor tower "
    "umbrella violin wedding anchor bell candle dream echo feather guest horizon idol jewel key "
    "ladder mask night".split()
)
