"""The places of make_knowledge.py, written by hand: regions, borders and capitals."""

from __future__ import annotations

CONTINENTS = {
    "Europe": "Spain France Britain Russia Germany Italy Austria Hungary Poland Portugal Denmark Norway Sweden "
    "Netherlands Belgium Switzerland Greece Ukraine Bosnia Kosovo Serbia Bulgaria Rumania Czechoslovakia Yugoslavia",
    "Asia": "China Japan Korea Vietnam India Pakistan Afghanistan Iran Iraq Israel Syria Lebanon Jordan Kuwait Turkey "
    "Indonesia Philippines Laos Cambodia Thailand",
    "Africa": "Egypt Libya Tunisia Morocco Algeria Liberia Angola Namibia Rhodesia Sudan Somalia Rwanda",
    "South America": "Colombia Venezuela Chile Peru Brazil Argentina Bolivia Paraguay Uruguay Ecuador",
    "Central America": "Mexico Cuba Panama Nicaragua Guatemala Honduras Haiti Salvador Grenada",
}
STATES = (
    "Texas California Oregon Florida Louisiana Kansas Nebraska Utah Virginia Ohio Illinois Missouri Arkansas Georgia "
    "Alabama Mississippi Tennessee Kentucky Indiana Michigan Massachusetts Maine Vermont Hawaii Alaska"
)
CAPITALS = {
    "Madrid": "Spain",
    "Paris": "France",
    "London": "Britain",
    "Berlin": "Germany",
    "Moscow": "Russia",
    "Vienna": "Austria",
    "Rome": "Italy",
    "Tokyo": "Japan",
    "Peking": "China",
    "Havana": "Cuba",
    "Baghdad": "Iraq",
    "Kabul": "Afghanistan",
    "Tehran": "Iran",
    "Tripoli": "Libya",
    "Washington": "United States",
}
BORDERS = (
    "Spain-France Spain-Portugal France-Germany France-Italy France-Belgium France-Switzerland Germany-Poland "
    "Germany-Denmark Germany-Austria Germany-Belgium Germany-Netherlands Germany-Czechoslovakia Austria-Hungary "
    "Austria-Italy Austria-Switzerland Norway-Sweden Russia-Ukraine Russia-Norway Poland-Ukraine Poland-Czechoslovakia "
    "Hungary-Ukraine Hungary-Rumania Bulgaria-Greece Bulgaria-Rumania Serbia-Bosnia Serbia-Kosovo Yugoslavia-Greece "
    "Iran-Iraq Iraq-Kuwait Iraq-Syria Iraq-Turkey Syria-Turkey Syria-Lebanon Israel-Lebanon Israel-Syria Israel-Jordan "
    "Iran-Afghanistan Iran-Pakistan Pakistan-Afghanistan Pakistan-India China-India China-Korea China-Vietnam "
    "Vietnam-Laos Vietnam-Cambodia Laos-Thailand Cambodia-Thailand China-Laos Egypt-Libya Libya-Tunisia "
    "Tunisia-Algeria Algeria-Morocco Egypt-Sudan Angola-Namibia Colombia-Venezuela Colombia-Peru Colombia-Ecuador "
    "Peru-Ecuador Peru-Chile Peru-Bolivia Chile-Bolivia Chile-Argentina Argentina-Bolivia Argentina-Paraguay "
    "Argentina-Uruguay Argentina-Brazil Brazil-Uruguay Brazil-Paraguay Brazil-Bolivia Brazil-Peru Brazil-Colombia "
    "Brazil-Venezuela Mexico-Guatemala Guatemala-Honduras Honduras-Nicaragua Honduras-Salvador Guatemala-Salvador "
    "Texas-Louisiana Texas-Arkansas Louisiana-Mississippi Mississippi-Alabama Alabama-Georgia Alabama-Florida "
    "Georgia-Florida Alabama-Tennessee Tennessee-Kentucky Kentucky-Ohio Kentucky-Indiana Ohio-Indiana Ohio-Michigan "
    "Indiana-Illinois Illinois-Missouri Missouri-Kansas Missouri-Arkansas Kansas-Nebraska California-Oregon "
    "Virginia-Kentucky Tennessee-Virginia Illinois-Kentucky"
)
# Other names of places in the texts.
NAMES = {
    "Great Britain": "Britain",
    "England": "Britain",
    "Soviet Union": "Russia",
    "South Vietnam": "Vietnam",
    "North Vietnam": "Vietnam",
    "South Korea": "Korea",
    "North Korea": "Korea",
    "El Salvador": "Salvador",
    "Hayti": "Haiti",
    "Romania": "Rumania",
    "Formosa": "China",
    "Holland": "Netherlands",
    "West Germany": "Germany",
}
NOT_PLACES = ("President Washington", "General Washington", "George Washington", "New Mexico", "West Virginia")
