"""How the course is made: sources in Markdown and Python become executed notebooks with static pictures. For maintainers and CI.

python -m notebooks.build make [NUMBER...]     write notebooks/*.ipynb, executed, from notebooks/source
python -m notebooks.build prose [NUMBER...]    write changed prose and ids into the kept notebooks, whose outputs stay
python -m notebooks.build check [NUMBER...]    execute afresh and compare the headline figures; changes nothing
python -m notebooks.build diagrams [NUMBER...] notebooks/source/*.png, the diagrams of the lessons, from the SVG beside them
python -m notebooks.build html                 the course as static pages, in artifacts/course
python -m notebooks.build slides [NUMBER...]   the pictures of the lessons as slides, in artifacts/slides
python -m notebooks.build handout [NUMBER...]  notebooks for a class, without outputs and solutions, in artifacts/class
python -m notebooks.build map                  notebooks/README.md, the lessons in their order
python -m notebooks.build tips                 docs/tips.md: every classic tip, its lesson, technique and effect

`--language de` takes the prose from notebooks/source/de and writes to notebooks/de: code, diagrams and ids of cells are shared.
"""
