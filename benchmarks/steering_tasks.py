"""Prompts and constraints of the steering benchmark. None of the nouns or keywords was in a prompt of the samples."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlhmm.steering.text_constraint import TextConstraint

TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"  # of the samples, and of every task

SAMPLED_NOUNS = """
accident actor adventure airport answer ant apartment apple army arrow artist autumn axe baby bag baker ball balloon
banana band bank barn basket bat battle beach bear bed bee bell belt bench berry bicycle bird birthday boat bone book
boss bottle bowl box boy brain branch bread breakfast bridge brother brush bucket building bus butterfly button cabin
cake camel camera camping candle candy canoe captain car carpet castle cat cave cellar chain chair champion cheese
chef chess chicken child church circle circus city clock cloud clown coast coat coffee coin color company compass
computer concert cookie cooking corn cottage country cousin cow crab crow crowd crown cup curtain customer dancer
dancing deer dentist desert desk detective diamond diary dinner dish doctor dog dolphin donkey door dragon dream dress
drum duck dust eagle earthquake egg election elephant engine evening exam experiment eye factory farm farmer father
fence festival field finger fire fish fishing flag flood flower fog football forest fork fox friend frog fruit game
garden gate ghost gift giraffe girl glass glove goat gold grandmother grass guitar hammer hand harbor hat health heart
hill history holiday homework honey horse hospital hotel house hunter ice idea insect internet island jacket jewel job
journey judge key king kitchen kite knife ladder lake lamp language law lawyer leaf learning lemon lesson letter
library lighthouse lion lizard log lunch machine magic mailman map market mask meadow medicine meeting memory milk
mirror mistake money monkey moon morning mother mountain mouse movie museum music neighbor nest newspaper night nose
number nurse ocean office orange oven owl painting panda parade park parrot party path peace pencil penguin pepper
phone piano picnic picture pig pigeon pillow pilot pirate plane planet plant plate playground pocket poem police pond
potato president price princess prison project promise pumpkin puppy puzzle queen question rabbit race rain rainbow
reading recipe restaurant rice ring river road robot rocket roof rope rose running sailing sailor salary sale salt
sandwich scarf school science scientist seal secret seed shadow shark sheep shelf ship shirt shoe shop silence singer
singing sister skiing sky smile snake snow snowman sofa soldier song soup spider spoon spring squirrel star station
statue stone storm story street student sugar summer sun sunset sweater swimming swing sword table tea teacher
teaching team telescope tennis tent theater thief ticket tiger tomato tooth tower toy tractor train traveling treasure
tree truck turtle umbrella uncle university valley village violin voice volunteer wall war water waterfall wedding
whale wheel wind window wine winter wizard wolf woman word writer zoo
""".split()  # of the prompts that the HMM's samples answer

NOUNS = """
acorn alley almond amulet anchor anvil apron aquarium arch armor artisan astronaut attic avalanche avenue backpack badge
badger bagel balcony bandage banjo banner barber barrel basement bathtub bay beaver beetle bishop blanket blizzard bonfire
bookshelf boulder bracelet brick broom bruise bubble buffalo bull bulldozer bunker bush cabbage cactus calendar canal
canary canvas caravan carrot cart cartoon cathedral cauliflower ceiling cemetery cereal chalk chapel cherry chimney
chipmunk choir cigar cliff cloak clover coach cobbler coconut comet comic cork corridor cottonwood cradle crane crater
cricket crocodile crystal cube cupboard cushion cyclist daisy dam dawn dice dock doll drawer driver dune easel echo eel
elevator elm emerald envelope falcon feather ferry fiddle firefly flute foal fortress fountain furnace gallery garage
garlic geyser glacier glue goose gorilla grape grocer guard gull gym hamster harp harvest hawk hedge helicopter helmet hen
hive hockey hoop hurricane igloo ink ivy jar jeweler jungle juggler kangaroo kettle kitten koala lagoon lantern laundry
lawn lettuce lobster locket locomotive lullaby lynx magnet mango mansion maple marathon marble mattress maze mechanic
melon mermaid meteor microscope mill miner minstrel mole monk moose moth motorcycle mule mushroom necklace needle nephew
newt nutmeg oasis oak octopus opera orchard orchid ostrich otter paddle palace panther
""".split()

KEYWORDS = """
always beautiful behind bright broken careful cold dark deep early empty fast find follow gentle golden green happy heavy
hidden hope keep laugh listen little lonely long loud never often old open quick quiet quietly remember rich sharp shine
sing slow small smooth soft sometimes strange strong sudden sweet tall tiny together touch under warm wild wonder young
""".split()


@dataclass(frozen=True)
class Task:
    """One prompt with one constraint."""

    name: str
    kind: str  # keywords, regex, json or words
    prompt: str
    max_new_tokens: int
    detail: tuple[str, ...]  # of the constraint, by kind

    def constraint(self) -> TextConstraint:
        """Return the constraint itself; its automaton is compiled here."""
        import json

        from vlhmm.steering import text_constraint as texts

        if self.kind == "keywords":
            return texts.must_include(*self.detail)
        if self.kind == "regex":
            return texts.regex(self.detail[0])
        if self.kind == "json":
            return texts.json_schema(json.loads(self.detail[0]))
        low, high = map(int, self.detail)
        return texts.words(low, high) & texts.sentence_end()


def prompt_of(noun: str) -> str:
    return f"Write one short sentence about a {noun}."


def keyword_tasks(number: int, max_new_tokens: int = 32, seed: int = 0) -> list[Task]:
    """Three keywords for each of the first nouns; a task does not depend on how many there are."""
    tasks = []
    for i, noun in enumerate(NOUNS[:number]):
        words = tuple(random.Random(f"{seed}/{noun}").sample(KEYWORDS, 3))
        tasks.append(Task(f"keywords-{i:03d}", "keywords", prompt_of(noun), max_new_tokens, words))
    return tasks


def other_tasks(number: int, max_new_tokens: int = 32) -> list[Task]:
    """Regular expressions, JSON schemas and word ranges in turn, from the last nouns."""
    import json

    tasks = []
    for i in range(number):
        noun, turn = NOUNS[-1 - i % len(NOUNS)], i // 3
        name = f"other-{i:03d}"
        if i % 3 == 0:
            patterns = (
                rf"(The|A|My) [a-z]{{3,8}} {noun} [a-z ,]{{10,60}}\.",
                r"[A-Z][a-z ,']{20,70}[.!]",
                rf"[A-Z][a-z, ]+ {noun}[a-z, ]{{0,20}}\.",
                r"(Yes|No), [a-z ,']{10,60}\.",
                r"[0-9]{1,2}\. [A-Z][a-z ,]{10,60}\.",
            )
            tasks.append(Task(name, "regex", prompt_of(noun), max_new_tokens, (patterns[turn % len(patterns)],)))
        elif i % 3 == 1:
            text = {"type": "string", "minLength": 3, "maxLength": 24}
            schemas = (
                {"name": text, "size": {"enum": ["small", "medium", "large"]}},
                {"noun": {"const": noun}, "color": {"enum": ["red", "green", "blue", "brown", "white"]}},
                {"old": {"type": "boolean"}, "name": text},
            )
            schema = schemas[turn % len(schemas)]
            described = {"type": "object", "properties": schema, "required": list(schema), "additionalProperties": False}
            prompt = f"Describe a {noun} as a JSON object with the fields {' and '.join(schema)}."
            tasks.append(Task(name, "json", prompt, max_new_tokens, (json.dumps(described),)))
        else:
            low = 4 + turn % 9
            tasks.append(Task(name, "words", prompt_of(noun), max_new_tokens, (str(low), str(low + 2))))
    return tasks
