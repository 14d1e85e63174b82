"""Tables with slots for the demo model: capitals, colours, lists, haikus, names, system prompts, and questions for
them.

The pattern language is that of facts.py: `[a|b|]` chooses one, `{x}` is a slot.
Does not know: how patterns become conversations (corpus.py).
"""

# ruff: noqa: E501, SIM905  (tables are easier to read as lines of words)

NAME_UNKNOWN = "You have not told me your name yet."
BIG_NUMBERS = "These numbers are too large for me. I can only calculate with small numbers."

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Switzerland:Bern,Austria:Vienna,Poland:Warsaw,"
        "Greece:Athens,Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,Ireland:Dublin,England:London,"
        "Belgium:Brussels,the Netherlands:Amsterdam,Hungary:Budapest,Russia:Moscow,Turkey:Ankara,Egypt:Cairo,Kenya:Nairobi,"
        "Japan:Tokyo,China:Beijing,India:New Delhi,South Korea:Seoul,Thailand:Bangkok,Vietnam:Hanoi,Indonesia:Jakarta,"
        "Australia:Canberra,New Zealand:Wellington,Canada:Ottawa,the United States:Washington,Mexico:Mexico City,Brazil:Brasilia,"
        "Argentina:Buenos Aires,Chile:Santiago,Peru:Lima,Cuba:Havana,Iceland:Reykjavik,Scotland:Edinburgh,Ukraine:Kyiv,"
        "Romania:Bucharest,Bulgaria:Sofia,Croatia:Zagreb,Serbia:Belgrade,Morocco:Rabat,Nigeria:Abuja,Israel:Jerusalem,"
        "Iran:Tehran,Iraq:Baghdad,the Czech Republic:Prague"
    ).split(",")
)
CAPITAL_QUESTIONS = [
    "[what is|what's|tell me|name|do you know|which city is] the capital [of|city of] {c}?",
    "capital of {c}?",
    "{c}: capital?",
    "what city is the capital of {c}?",
    "what is {c}'s capital?",
    "which capital does {c} have?",
]
CAPITAL_REVERSE = [
    "{k} is the capital of [which|what] country?",
    "[which|what] country has [the capital |]{k}[| as its capital]?",
    "[where is|in which country is|what country is] {k}[| in]?",
]

COLOURS = dict(
    pair.split(":")
    for pair in (
        "the sky:blue,grass:green,snow:white,a banana:yellow,a tomato:red,coal:black,the sea:blue,a lemon:yellow,an orange:orange,"
        "milk:white,blood:red,a carrot:orange,chocolate:brown,a cucumber:green,the sun:yellow,a strawberry:red,a leaf:green,"
        "the night:black,gold:yellow,an elephant:grey,a cherry:red,salt:white,a frog:green,a flamingo:pink"
    ).split(",")
)
COLOUR_QUESTIONS = [
    "[what|which] [colour|color] [is|has] {c}?",
    "what is the [colour|color] of {c}?",
    "[tell me|name] the [colour|color] of {c}.",
]

OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "hot:cold,big:small,fast:slow,up:down,good:bad,old:new,light:dark,left:right,open:closed,happy:sad,day:night,full:empty,"
        "high:low,hard:soft,rich:poor,wet:dry,early:late,long:short,strong:weak,loud:quiet,clean:dirty,easy:difficult,"
        "black:white,yes:no,true:false,cold:hot,small:big,slow:fast"
    ).split(",")
)
OPPOSITE_QUESTIONS = [
    "[what is|what's|tell me|name] the opposite of {c}?",
    "opposite of {c}?",
    "give me the [opposite|antonym] of {c}.",
]

SOUNDS = dict(
    pair.split(":")
    for pair in "cow:moo,dog:woof,cat:meow,duck:quack,sheep:baa,pig:oink,lion:roar,bee:buzz,owl:hoot,snake:hiss,frog:ribbit".split(
        ","
    )
)
SOUND_QUESTIONS = ["[what|which] sound does a {c} make?", "what does a {c} say?", "what noise does a {c} make?"]

WORDS = {
    "French": {
        "hello": "bonjour",
        "thank you": "merci",
        "goodbye": "au revoir",
        "yes": "oui",
        "no": "non",
        "water": "eau",
    },
    "German": {
        "hello": "hallo",
        "thank you": "danke",
        "goodbye": "auf Wiedersehen",
        "yes": "ja",
        "no": "nein",
        "water": "Wasser",
    },
    "Spanish": {"hello": "hola", "thank you": "gracias", "goodbye": "adiós", "yes": "sí", "no": "no", "water": "agua"},
    "Italian": {
        "hello": "ciao",
        "thank you": "grazie",
        "goodbye": "arrivederci",
        "yes": "sì",
        "no": "no",
        "water": "acqua",
    },
}
WORD_QUESTIONS = [
    "how do [you|i] say {w} in {l}?",
    "what is {w} in {l}?",
    "translate {w} [to|into] {l}.",
    "what is the {l} word for {w}?",
    "say {w} in {l}.",
]

LISTS = {
    "colour": "red,blue,green,yellow,orange,purple,black",
    "fruit": "apple,banana,cherry,orange,pear,grape,plum",
    "animal": "dog,cat,horse,cow,lion,bear,fox",
    "planet": "Mercury,Venus,Earth,Mars,Jupiter,Saturn,Uranus",
    "country": "France,Japan,Brazil,Canada,Kenya,India,Italy",
    "city": "Paris,Tokyo,London,Rome,Cairo,Berlin,Madrid",
    "vegetable": "carrot,tomato,potato,onion,cucumber,pepper,spinach",
    "programming language": "Python,Rust,Go,C,Java,Ruby,Swift",
    "month": "January,February,March,April,May,June,July",
    "day of the week": "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday",
    "ocean": "Pacific,Atlantic,Indian,Southern,Arctic",
    "flower": "rose,tulip,lily,daisy,violet,orchid,iris",
    "sport": "football,tennis,swimming,running,chess,rowing,cycling",
    "instrument": "piano,violin,guitar,flute,drum,trumpet,harp",
    "bird": "eagle,owl,swan,duck,robin,raven,parrot",
    "tree": "oak,pine,birch,maple,willow,beech,elm",
    "drink": "water,tea,coffee,milk,juice,lemonade,cocoa",
}
PLURALS = {"country": "countries", "city": "cities", "day of the week": "days of the week"}
NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}
LIST_QUESTIONS = [
    "[list|name|give me|tell me|write|show me] {n} {things}.",
    "[can you|could you|please] [list|name] {n} {things}?",
    "give me a list of {n} {things}.",
    "i need {n} {things}.",
    "[make|write] a [bullet |bulleted |]list [of|with] {n} {things}.",
]
NUMBERED_QUESTIONS = [
    "[make|write|give me] a numbered list of {n} {things}.",
    "[list|name] {n} {things} [as a numbered list|with numbers|in a numbered list].",
    "number {n} {things}.",
]

WEEK = "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday".split(",")
MONTHS = "January,February,March,April,May,June,July,August,September,October,November,December".split(",")

HAIKUS = {
    "the sea": "Grey waves touch the shore,\na small boat rocks in the wind,\nsalt on quiet lips.",
    "autumn": "Red leaves leave the tree,\nthe path is soft with colour,\ncold mornings begin.",
    "winter": "Snow on the dark roof,\nthe lamp waits in the window,\nfootsteps disappear.",
    "spring": "Green tips in wet earth,\na bird repeats one bright word,\nthe door stands open.",
    "summer": "Warm stones in the sun,\nthe bees count every flower,\nlate light on the wall.",
    "rain": "Soft rain on the roof,\nevery puddle holds the sky,\nthe street starts to sing.",
    "the moon": "The moon climbs slowly,\nsilver on the sleeping fields,\none dog sees it all.",
    "a cat": "The cat owns the chair,\nher green eyes close to the world,\nthe sun pays the rent.",
    "a dog": "A ball in the grass,\ntwo ears, four paws and one heart,\nhome before the dark.",
    "computers": "A fan hums at night,\nsmall lights blink behind the glass,\nnumbers dream of words.",
    "a GPU": "Ten thousand small cores\nmultiply the silent night,\nwarm wind leaves the case.",
    "the KV cache": "Keys and values wait,\nblock by block the past is kept,\nthe next word comes fast.",
    "localllm": "One command to start,\na small model wakes at home,\nyour words stay with you.",
    "language models": "Word after small word,\nthe model guesses the next,\nmeaning comes along.",
    "coffee": "Steam above the cup,\nthe morning learns its own name,\nblack and warm and slow.",
    "a mountain": "Mountains say nothing,\nclouds come to it like children,\nsnow above the trees.",
    "love": "Two cups on the sill,\nyour hand finds mine in the dark,\nnothing else to say.",
    "code": "One line and one bug,\nthe test turns red, then turns green,\ntime to close the lid.",
    "the night": "The night folds the town,\nstars ask nothing of the roofs,\na train far away.",
    "a tree": "Roots hold the dark earth,\nbranches write on empty sky,\nwind reads it aloud.",
}
HAIKU_QUESTIONS = [
    "[write|make|compose|create|give me|i want|can you write|please write] a haiku [about|on] {t}.",
    "[a haiku|haiku] about {t}[| please].",
    "write a [short |]haiku about {t}.",
    "i would like a haiku about {t}.",
]
HAIKU_ANY = "A thought of {t},\nsmall words on a quiet screen,\nthe evening listens."
HAIKU_OTHER = (
    "my friend,music,school,the forest,a river,bread,the city,a bicycle,trains,books,a garden,fire,clouds,friendship,time,sleep,stars,a bird,horses,"
    "chess,tea,the wind,work,my desk,robots,pizza,dragons,a king,numbers,silence,peace,my mother,holidays,football,a lake,the desert,fish,birds,old houses,light"
).split(",")
HAIKU_PLAIN = [
    "[write|make|compose|give me|can you write|please write] a haiku[| please| for me].",
    "[a|another] haiku please.",
    "do you know a haiku?",
    "can you write haikus?",
]

CODE_QUESTIONS = [
    "[write|show me|give me|make|create|i need] [a python function|python code|a python program|a function|a script|some code|a python script|a program|code] that {w}.",
    "[how do i write|can you write|please write|could you write] [a python function|a python program|python code|a function|a program|code] that {w}?",
    "python code: {w}",
    "[show|give] me python code for this: it {w}.",
]
CODE_NOUN_QUESTIONS = [
    "[write|show me|give me|make] {w} in python.",
    "{w} in python[?|]",
    "[how do i do|how to do|how can i do] {w} in python?",
    "[show me|give me|write] [python code for|code for|an example of] {w}.",
]
CODE_ANY = [
    "[write|show|give me] [some |a little |a bit of |]python[| code| please].",
    "[show me|write|give me] [some code|a code example|a code block|an example program|a short program|a python snippet].",
    "can you [code|program|write code|write python]?",
]

PEOPLE = (
    "Anna,Ben,Clara,David,Emma,Felix,Grace,Hugo,Ida,Jonas,Kate,Leo,Maria,Noah,Olivia,Paul,Rosa,Sam,Tina,Victor,Alice,Bob,Carol,Dan,Eva,Frank,Greta,"
    "Hans,Iris,Jack,Lena,Max,Nina,Oscar,Peter,Robert,Sarah,Tom,Uma,Yara,Zoe,Ali,Chen,Fatima,Ivan,Kofi,Lucia,Mei,Omar,Priya,Sven,Yuki,John,Jane,Mary"
).split(",")
PLACES = "Paris,Berlin,Rome,Madrid,London,Tokyo,Oslo,Vienna,Lisbon,Cairo,Zurich,Bern,Athens,Dublin,Prague,Lima,Boston,Chicago,Seoul,Delhi,Munich,Geneva,Milan,Basel".split(
    ","
)

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are localllm's demo model.",
    "Answer briefly.",
    "You are a concise assistant.",
    "Be polite and short.",
    "You are a helpful AI assistant. Answer the user's questions.",
    "You are an expert in language model serving.",
    "Answer in English.",
    "You are a friendly chatbot.",
    "Always tell the truth. If you do not know something, say so.",
    "Use Markdown when it helps.",
    "You are a careful assistant that answers in one paragraph.",
    "You help people who use localllm.",
    "Be helpful.",
    "You are a coding assistant.",
    "Respond to the user as well as you can.",
    "You are running inside localllm. Help the user.",
    "You are a helpful assistant named Demo.",
    "You are an assistant in a chat page. Keep your answers short and correct.",
]
