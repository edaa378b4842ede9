"""Makes the small graph and the questions of the commonsense task: ``python tools/make_commonsense.py``.

The graph is written for this project: everyday things, what they are, where they are found, and what they are used for
and made of. Questions are derived from its edges by rules. Questions of the dev set are about things that no question
of the training set is about, so that a model can answer them only by the graph. Of the four wrong choices, two answer
the same kind of question about other things, and two are related to the same thing in another way. The output is
deterministic.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

OUTPUT = Path(__file__).resolve().parent.parent / "python" / "fasttfm" / "data" / "corpus" / "tasks"
CHOICES = 5

# thing: kind | where it is found | what it is used for | what it is made of
THINGS = """
cup: vessel | kitchen, cafe | drinking_tea | porcelain
kettle: vessel | kitchen | boiling_water | steel
frying_pan: vessel | kitchen | frying_eggs | iron
bucket: vessel | barn, shed | carrying_water | plastic
barrel: vessel | cellar, ship | storing_wine | oak
knife: tool | kitchen, drawer | cutting_bread | steel
hammer: tool | workshop, toolbox | driving_nails | iron
saw: tool | workshop | cutting_wood | steel
screwdriver: tool | toolbox | turning_screws | steel
rake: tool | garden, shed | gathering_leaves | bamboo
spade: tool | garden, shed | digging_holes | iron
ladder: tool | shed, building_site | climbing_roofs | aluminium
needle: tool | sewing_box | sewing_clothes | steel
scissors: tool | desk, sewing_box | cutting_paper | steel
broom: tool | closet | sweeping_floors | straw
fishing_rod: tool | boat, lake | catching_fish | bamboo
axe: tool | forest, shed | felling_trees | iron
anvil: tool | smithy | forging_horseshoes | iron
loom: machine | mill | weaving_cloth | wood
plough: machine | field, farm | turning_soil | iron
tractor: vehicle | farm, field | pulling_ploughs | metal
lawn_mower: machine | garden | cutting_grass | metal
washing_machine: machine | laundry | washing_clothes | metal
sewing_machine: machine | tailor_shop | making_dresses | metal
printing_press: machine | newspaper | printing_books | iron
clock: instrument | wall, tower | telling_time | brass
compass: instrument | ship, backpack | finding_north | brass
telescope: instrument | observatory | watching_stars | glass
microscope: instrument | laboratory | seeing_germs | glass
thermometer: instrument | hospital | measuring_fever | glass
barometer: instrument | weather_station | forecasting_storms | brass
scales: instrument | market, pharmacy | weighing_fruit | brass
violin: musical_instrument | orchestra | playing_melodies | spruce
piano: musical_instrument | concert_hall | accompanying_singers | wood
drum: musical_instrument | parade | beating_time | skin
trumpet: musical_instrument | orchestra, parade | sounding_signals | brass
flute: musical_instrument | orchestra | playing_melodies | silver
church_bell: musical_instrument | steeple | calling_worshippers | bronze
bed: furniture | bedroom, hotel | sleeping | wood
pillow: bedding | bedroom, sofa | resting_heads | feathers
blanket: bedding | bedroom | keeping_warm | wool
table: furniture | dining_room | serving_meals | oak
bookshelf: furniture | library, study | storing_books | wood
wardrobe: furniture | bedroom | hanging_coats | wood
throne: furniture | palace | seating_kings | gold
crib: furniture | nursery | putting_babies_to_bed | wood
lamp: light | desk, study | reading_at_night | glass
candle: light | church, dining_room | lighting_dinners | wax
lantern: light | ship, barn | walking_in_the_dark | tin
lighthouse: building | coast | warning_ships | stone
windmill: building | hill | grinding_grain | wood
greenhouse: building | garden, nursery_garden | growing_tomatoes | glass
dam: building | river | holding_back_water | concrete
bridge: building | river | crossing_water | stone
tent: shelter | camp_site | camping | canvas
igloo: shelter | arctic | hiding_from_blizzards | snow
umbrella: clothing | hallway | staying_dry | nylon
coat: clothing | wardrobe_room, hallway | keeping_warm | wool
boots: clothing | hallway, stable | walking_through_mud | leather
gloves: clothing | drawer | warming_hands | leather
helmet: clothing | building_site, garage | protecting_heads | plastic
apron: clothing | kitchen, smithy | keeping_clothes_clean | cotton
crown: clothing | palace, museum | showing_royalty | gold
spectacles: clothing | study | seeing_clearly | glass
raincoat: clothing | hallway | staying_dry | rubber
bicycle: vehicle | street, garage | riding_to_school | aluminium
train: vehicle | railway_station | crossing_countries | steel
sailing_boat: vehicle | harbour, lake | catching_wind | wood
canoe: vehicle | river, lake | paddling | birch_bark
ambulance: vehicle | hospital | rushing_patients | metal
fire_engine: vehicle | fire_station | putting_out_fires | metal
sledge: vehicle | arctic, hill | sliding_over_snow | wood
wheelbarrow: vehicle | building_site, garden | moving_earth | metal
airplane: vehicle | airport | flying_abroad | aluminium
rocket: vehicle | launch_pad | reaching_space | titanium
book: paper_goods | library, bookstore | learning | paper
newspaper_page: paper_goods | kiosk | following_events | paper
map: paper_goods | backpack, car | finding_the_way | paper
envelope: paper_goods | post_office | mailing_letters | paper
stamp: paper_goods | post_office | paying_postage | paper
banknote: paper_goods | bank, wallet | buying_things | cotton
notebook: paper_goods | school, desk | taking_notes | paper
chalk: stationery | school | writing_on_blackboards | limestone
pencil: stationery | desk, school | drawing_pictures | graphite
eraser: stationery | school | removing_mistakes | rubber
paintbrush: stationery | studio | painting_portraits | hair
rope: equipment | ship, mountain | tying_knots | hemp
net: equipment | boat, tennis_court | catching_fish | nylon
anchor: equipment | ship, harbour | holding_ships | iron
sail: equipment | mast | catching_wind | canvas
saddle: equipment | stable | riding_horses | leather
parachute: equipment | airport, aircraft_hangar | jumping_safely | silk
bandage: medicine | hospital, first_aid_kit | covering_wounds | cotton
syringe: medicine | hospital | giving_injections | plastic
pill: medicine | pharmacy | easing_pain | powder
soap: toiletry | bathroom | washing_hands | fat
towel: toiletry | bathroom, beach | drying_off | cotton
toothbrush: toiletry | bathroom | cleaning_teeth | plastic
mirror: toiletry | bathroom, hall_of_mirrors | seeing_yourself | glass
comb: toiletry | bathroom | tidying_hair | horn
football: toy | stadium, playground | scoring_goals | leather
doll: toy | nursery, toy_shop | pretending | cloth
kite: toy | beach, hill | catching_wind | paper
marble: toy | playground | shooting_games | glass
chessboard: toy | club | planning_moves | wood
swing: toy | playground | going_up_and_down | rope_and_wood
"""

# Kinds: their own kind, and where all things of the kind are found, which is an answer over two edges.
KINDS = """
vessel: container | cupboard
tool: device | hardware_store
machine: device | factory
instrument: device | science_museum
musical_instrument: device | music_school
furniture: object | furniture_store
bedding: object | linen_cupboard
light: object | lighting_shop
building: structure | city_map
shelter: structure | outdoor_show
clothing: object | department_store
vehicle: device | traffic
paper_goods: object | stationery_shop
stationery: object | pencil_case
equipment: object | storeroom
medicine: object | medicine_chest
toiletry: object | washbag
toy: object | toy_chest
"""

WORDINGS = {
    "AtLocation": "Where would you find a {}?",
    "UsedFor": "What is a {} good for?",
    "MadeOf": "Which material is a {} made of?",
    "KindAtLocation": "Where is a {} kept together with others of its kind?",
}


class Edge(NamedTuple):
    relation: str
    head: str
    tail: str


def edges() -> list[Edge]:
    edges = []
    for line in THINGS.strip().splitlines():
        thing, _, rest = line.partition(": ")
        kind, places, use, material = (part.strip() for part in rest.split("|"))
        edges.append(Edge("IsA", thing, kind))
        edges += [Edge("AtLocation", thing, place) for place in places.split(", ")]
        edges += [Edge("UsedFor", thing, use), Edge("MadeOf", thing, material)]
    for line in KINDS.strip().splitlines():
        kind, _, rest = line.partition(": ")
        above, place = (part.strip() for part in rest.split("|"))
        edges += [Edge("IsA", kind, above), Edge("AtLocation", kind, place)]
    return edges


def questions(graph: list[Edge], random: np.random.Generator) -> dict[str, list[dict[str, object]]]:
    """The questions of both sets: of every fourth thing in the dev set, of the others in the training set."""
    things = [line.partition(":")[0] for line in THINGS.strip().splitlines()]
    kind_of = {edge.head: edge.tail for edge in graph if edge.relation == "IsA"}
    tails = {
        (relation, head): [edge.tail for edge in graph if edge[:2] == (relation, head)] for relation, head, _ in graph
    }
    sets: dict[str, list[dict[str, object]]] = {"train": [], "dev": []}
    for number, thing in enumerate(things):
        part = sets["dev" if number % 4 == 3 else "train"]
        for asked, wording in WORDINGS.items():
            relation = asked.removeprefix("Kind")
            head = kind_of[thing] if asked.startswith("Kind") else thing
            answers = tails[relation, head]
            linked = {edge.tail for edge in graph if edge.head in (thing, kind_of[thing])} - {kind_of[kind_of[thing]]}
            heads = [kind_of[other] if asked.startswith("Kind") else other for other in things]
            same = sorted({tail for other in heads for tail in tails[relation, other]} - linked)
            other_ways = sorted(linked - set(answers))
            right = answers[int(random.integers(len(answers)))]
            wrong = [*random.choice(same, 2, replace=False), *random.choice(other_ways, 2, replace=False)]
            choices = [right, *map(str, wrong)]
            order = random.permutation(CHOICES).tolist()
            part.append(_row(f"{thing}-{asked}", wording.format(thing), [choices[i] for i in order], order.index(0)))
    return {name: [rows[i] for i in random.permutation(len(rows))] for name, rows in sets.items()}


def _row(name: str, question: str, choices: list[str], right: int) -> dict[str, object]:
    """A question in the format of CommonsenseQA."""
    listed = [{"label": "ABCDE"[i], "text": choice.replace("_", " ")} for i, choice in enumerate(choices)]
    concept = name.partition("-")[0].replace("_", " ")
    asked = {"question_concept": concept, "choices": listed, "stem": question.replace("_", " ")}
    return {"answerKey": "ABCDE"[right], "id": name, "question": asked}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes the graph and the questions of the commonsense task.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT.name} in the package's corpus")
    parsed = parser.parse_args(arguments)
    graph = edges()
    files = {"graph.tsv": "".join("\t".join(edge) + "\t1.0\n" for edge in graph)}
    for name, rows in questions(graph, np.random.Generator(np.random.Philox(key=5))).items():
        files[f"{name}.jsonlines"] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in files.items():
        path = parsed.output / f"commonsense-{name}"
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text.splitlines())} lines, {len(text.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
