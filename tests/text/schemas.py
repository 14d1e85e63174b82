"""JSON schemas as people write them for language models: records to fill from a text, arguments of tools, plans.

`SCHEMAS` by name. Short helpers, because a hundred of them are read as a list.
"""

# ruff: noqa: E501
from typing import Any

Schema = dict[str, Any]


def obj(required: str | None = None, /, **properties: Schema) -> Schema:
    """An object that has these and nothing else; `required`: names, all where it is left out."""
    names = list(properties) if required is None else required.split()
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def text(longest: int | None = 12, **more: Any) -> Schema:
    return {"type": "string", **({} if longest is None else {"maxLength": longest}), **more}


def whole(low: int | None = None, high: int | None = None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{name: value for name, value in bounds.items() if value is not None}}


def real(low: float | None = None, high: float | None = None) -> Schema:
    return {**whole(), **{k: v for k, v in (("minimum", low), ("maximum", high)) if v is not None}, "type": "number"}


def each(item: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def kind(name: str, **properties: Schema) -> Schema:
    """One of several, told apart by `type`."""
    return obj(type={"const": name}, **properties)


YES = {"type": "boolean"}
DATE, TIME, MAIL, UUID = ({"type": "string", "format": f} for f in ("date", "date-time", "email", "uuid"))
PERSON = obj(name=text(), age=whole(0, 150))
MONEY = obj(amount=real(0), currency=one_of("EUR", "USD", "GBP", "JPY"))
ADDRESS = obj(
    "street city country", street=text(), city=text(), zip=text(8, pattern="^[0-9]{4,5}$"), country=text(2, minLength=2)
)

SCHEMAS: dict[str, Schema] = {
    # records
    "person": PERSON,
    "person with mail": obj("name", name=text(), email=MAIL, phone=text(None, pattern=r"^\+?[0-9 ]{6,15}$")),
    "address": ADDRESS,
    "contact": obj(person=PERSON, addresses=each(ADDRESS, 2)),
    "money": MONEY,
    "invoice": obj(number=text(), date=DATE, lines=each(obj(item=text(), count=whole(1, 99), price=MONEY), 2, 1)),
    "order": obj(id=UUID, placed=TIME, status=one_of("new", "paid", "sent", "done"), total=real(0)),
    "product": obj("sku name", sku=text(None, pattern="^[A-Z]{3}-[0-9]{4}$"), name=text(), tags=each(text(6)), price=MONEY),
    "review": obj(stars=whole(1, 5), title=text(), body=text(20), recommends=YES),
    "book": obj(title=text(), authors=each(text(), 3, 1), year=whole(1450, 2100), isbn=text(None, pattern="^[0-9]{13}$")),
    "film": obj(title=text(), minutes=whole(1, 600), genres=each(one_of("drama", "comedy", "horror"))),
    "recipe": obj(name=text(), serves=whole(1, 20), steps=each(text(), 3, 1), oven=maybe(whole(50, 300))),
    "ingredient": obj(name=text(), amount=real(0), unit=one_of("g", "ml", "piece", "spoon")),
    "flight": obj(code=text(None, pattern="^[A-Z]{2}[0-9]{1,4}$"), start=TIME, stops=each(text(3), 2)),
    "hotel": obj(name=text(), stars=whole(1, 5), rooms=each(obj(beds=whole(1, 4), price=MONEY), 2)),
    "event": obj("title start", title=text(), start=TIME, end=TIME, where=text(), guests=each(MAIL, 2)),
    "meeting minutes": obj(date=DATE, present=each(text()), decisions=each(obj(what=text(), who=text(), until=DATE), 2)),
    "todo": obj(title=text(), done=YES, due=maybe(DATE), priority=one_of("low", "normal", "high")),
    "todo list": obj(items=each(obj(title=text(), done=YES), 3)),
    "company": obj(name=text(), employees=whole(1), founded=whole(1600, 2100), public=YES),
    "job offer": obj(title=text(), salary=obj(low=whole(0), high=whole(0)), remote=one_of("no", "partly", "fully")),
    "cv": obj(name=text(), jobs=each(obj(where=text(), since=whole(1950, 2100), until=maybe(whole(1950, 2100))), 2)),
    "patient": obj(name=text(), born=DATE, allergies=each(text()), smoker=maybe(YES)),
    "prescription": obj(drug=text(), milligrams=real(0, 5000), times_a_day=whole(1, 6)),
    "lab value": obj(name=text(), value=real(), unit=text(6), flag=one_of("low", "normal", "high", None)),
    "weather": obj(city=text(), celsius=real(-90, 60), sky=one_of("clear", "cloudy", "rain", "snow")),
    "forecast": obj(days=each(obj(date=DATE, low=real(), high=real()), 3, 1)),
    "coordinates": obj(lat=real(-90, 90), lon=real(-180, 180)),
    "route": obj(points=each(obj(lat=real(-90, 90), lon=real(-180, 180)), 3, 2), kilometres=real(0)),
    "car": obj(make=text(), model=text(), year=whole(1886, 2100), fuel=one_of("petrol", "diesel", "electric")),
    "licence plate": obj(plate=text(None, pattern="^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$")),
    "bank transfer": obj(iban=text(None, pattern="^[A-Z]{2}[0-9]{20}$"), amount=MONEY, purpose=text()),
    "contract": obj(parties=each(text(), 2, 2), signed=DATE, months=maybe(whole(1, 120))),
    "ticket": obj(title=text(), severity=whole(1, 4), labels=each(one_of("bug", "docs", "speed")), assignee=maybe(text())),
    "bug report": obj(steps=each(text(), 3, 1), expected=text(), actual=text(), version=text(None, pattern=r"^[0-9]+\.[0-9]+$")),
    "commit": obj(type=one_of("feat", "fix", "docs", "test"), scope=maybe(text()), subject=text(20)),
    "changelog": obj(version=text(None, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$"), added=each(text()), fixed=each(text())),
    "code review": obj(verdict=one_of("approve", "change"), remarks=each(obj(file=text(), line=whole(1), text=text()), 2)),
    "diff hunk": obj(file=text(), start=whole(1), removed=each(text(), 2), added=each(text(), 2)),
    "dependency": obj(name=text(None, pattern="^[a-z][a-z0-9-]{0,20}$"), version=text(8), optional=YES),
    "log line": obj(time=TIME, level=one_of("DEBUG", "INFO", "WARNING", "ERROR"), message=text(20)),
    "metric": obj(name=text(), value=real(), labels={"type": "object", "additionalProperties": text(6), "maxProperties": 2}),
    # judgements
    "sentiment": obj(sentiment=one_of("positive", "neutral", "negative"), confidence=real(0, 1)),
    "classification": obj(label=one_of("spam", "ham"), reasons=each(text())),
    "several labels": obj(labels=each(one_of("politics", "sports", "science", "culture"), 4, 1)),
    "language": obj(language=text(None, pattern="^[a-z]{2}$"), sure=YES),
    "toxicity": obj(insult=real(0, 1), threat=real(0, 1), obscene=real(0, 1)),
    "grade": obj(points=whole(0, 15), comment=text(20)),
    "preference": obj(better=one_of("A", "B", "tie"), because=text(20)),
    "fact check": obj(claim=text(20), verdict=one_of(True, False, None), sources=each(text(), 2)),
    "entailment": obj(label=one_of("entailment", "neutral", "contradiction")),
    "moderation": obj(flagged=YES, categories=obj(violence=YES, hate=YES, self_harm=YES)),
    "intent": obj(intent=one_of("greet", "order", "cancel", "other"), slots=obj("", item=text(), count=whole(1, 9))),
    "urgency": obj(urgency={"type": "integer", "enum": [1, 2, 3]}),
    "eligible": obj(eligible=YES, missing=each(text())),
    # taken from a text
    "entities": obj(entities=each(obj(text=text(), type=one_of("person", "place", "company")), 3)),
    "relations": obj(triples=each(obj(subject=text(), relation=text(), object=text()), 2)),
    "keywords": obj(keywords=each(text(8), 5, 1)),
    "summary": obj(title=text(), points=each(text(20), 3, 1)),
    "translation": obj(source=text(2), target=text(2), text=text(20)),
    "quotes": obj(quotes=each(obj(who=text(), said=text(20)), 2)),
    "timeline": obj(events=each(obj(date=DATE, what=text()), 3)),
    "table": obj(header=each(text(6), 3, 3), rows=each(each(text(6), 3, 3), 2)),
    "citation": obj(authors=each(text(), 2, 1), title=text(), year=whole(1500, 2100), doi=maybe(text(None, pattern=r"^10\.[0-9]{4}/[a-z0-9]{1,8}$"))),
    "question and answer": obj(pairs=each(obj(question=text(20), answer=text(20)), 2, 1)),
    "quiz": obj(question=text(20), options=each(text(), 4, 4), correct=whole(0, 3)),
    "flash card": obj(front=text(), back=text()),
    "persona": obj(name=text(), traits=each(text(8), 3, 1), goal=text(20)),
    "story": obj(title=text(), chapters=each(obj(title=text(), pages=whole(1, 99)), 2, 1)),
    "dialogue": obj(turns=each(obj(who=one_of("A", "B"), text=text()), 3, 1)),
    "poem": obj(lines=each(text(20), 4, 2)),
    "colour": obj(hex=text(None, pattern="^#[0-9a-f]{6}$")),
    "palette": obj(colours=each(text(None, pattern="^#[0-9a-f]{6}$"), 3, 1), dark=YES),
    # reasoning
    "steps": obj(steps=each(obj(explanation=text(20), output=text()), 3, 1), answer=text()),
    "number answer": obj(reasoning=text(20), answer=real()),
    "plan": obj(goal=text(), tasks=each(obj(id=whole(1, 9), what=text(), after=each(whole(1, 9), 2)), 2, 1)),
    "next action": {"anyOf": [kind("search", query=text()), kind("open", url=text()), kind("answer", text=text())]},
    "guess": obj(guess=text(), confidence=real(0, 1)),
    "pros and cons": obj(pros=each(text()), cons=each(text()), verdict=text()),
    # arguments of tools
    "get weather": obj("city", city=text(), unit=one_of("celsius", "fahrenheit")),
    "search": obj("query", query=text(), limit=whole(1, 50), site=text()),
    "send mail": obj("to subject body", to=each(MAIL, 2, 1), subject=text(), body=text(20), cc=each(MAIL, 2)),
    "run code": obj(language=one_of("python", "bash"), code=text(30)),
    "read file": obj("path", path=text(), start=whole(1), end=whole(1)),
    "edit file": obj(path=text(), old=text(), new=text()),
    "sql": obj(query=text(30), parameters=each({"type": ["string", "integer", "null"], "maxLength": 5}, 2)),
    "http request": obj("method url", method=one_of("GET", "POST"), url=text(), headers={"type": "object", "additionalProperties": text(5), "maxProperties": 2}),
    "set alarm": obj(time=text(None, pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$"), days=each(one_of("mo", "tu", "we"))),
    "light": obj("room", room=text(), on=YES, brightness=whole(0, 100)),
    "move": obj(x=whole(-10, 10), y=whole(-10, 10)),
    "chess move": obj(move=text(None, pattern="^[a-h][1-8][a-h][1-8]$")),
    "calculator": obj(left=real(), operator=one_of("+", "-", "*", "/"), right=real()),
    "no arguments": obj(),
    # shapes
    "bare list": each(text(5), 3),
    "bare number": real(),
    "bare choice": one_of("yes", "no"),
    "pair": {"type": "array", "prefixItems": [text(5), whole()], "items": False, "minItems": 2},
    "nested": obj(a=obj(b=obj(c=obj(d=whole())))),
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": obj("name", name=text(5), children=each({"$ref": "#/$defs/node"}, 2))}},
    "shared part": {**obj(home={"$ref": "#/$defs/a"}, work={"$ref": "#/$defs/a"}), "$defs": {"a": obj(city=text())}},
    "union of records": obj(shape={"anyOf": [kind("circle", radius=real(0)), kind("square", side=real(0))]}),
    "list of unions": obj(shapes=each({"oneOf": [kind("circle", radius=real(0)), kind("square", side=real(0))]}, 2)),
    "open object": {"type": "object", "properties": {"a": whole()}, "additionalProperties": whole()},
    "named by pattern": {"type": "object", "patternProperties": {"^x_[a-z]{1,4}$": whole()}, "additionalProperties": False, "maxProperties": 3},
    "all of": {"allOf": [{"type": "object", "properties": {"a": whole()}, "required": ["a"]}, {"type": "object", "properties": {"b": YES}, "required": ["b"]}], "maxProperties": 2},
    "multiple": obj(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "exclusive": obj(p={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    "odd names": obj(**{"with space": whole(), 'with "quotes"': whole(), "grüße": whole(), "a\\b": whole()}),
    "constants": obj(version={"const": 2}, kind={"const": "x"}, empty={"const": None}, list={"const": [1, 2]}),
}  # fmt: skip
