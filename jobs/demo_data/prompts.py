"""Simulated clients of the demo: seeded prompts of three domains, made from templates.

`tickets` is narrow (support tickets to JSON: the kind of traffic a domain drafter is made for);
`general` is broad (many small tasks). `orders` is narrow too, and only `flywheel demo-fleet` sends
it: traffic that the first drafter has never seen. The answers are always the target's own.
"""

import random
from dataclasses import dataclass

TICKET_SYSTEM = "Turn the ticket into JSON."
TICKET_EXAMPLE = (
    "Ana Silva, Porto, order 4410: my tablet has a bent frame since noon. I want a discount."
)
TICKET_ANSWER = (
    '{"name": "Ana Silva", "city": "Porto", "order": 4410, "product": "tablet", '
    '"problem": "a bent frame", "since": "noon", "wants": "a discount", '
    '"reply": "Dear Ana Silva, we will arrange a discount for your tablet."}'
)
FIRST_NAMES = ["Maria", "John", "Wei", "Fatima", "Lukas", "Olga", "Kofi", "Emma", "Diego", "Yuki"]
LAST_NAMES = [
    "Rossi",
    "Smith",
    "Chen",
    "Haddad",
    "Novak",
    "Petrov",
    "Mensah",
    "Brown",
    "Lopez",
    "Sato",
]
CITIES = [
    "Paris",
    "Rome",
    "Oslo",
    "Berlin",
    "Madrid",
    "Vienna",
    "Lisbon",
    "Dublin",
    "Prague",
    "Athens",
]
PROBLEMS = {
    "laptop": ["a cracked screen", "a broken keyboard", "a loud fan"],
    "phone": ["a dead battery", "a scratched camera", "no signal"],
    "printer": ["a paper jam", "empty ink", "no connection"],
    "router": ["a weak signal", "a broken port", "no internet"],
    "monitor": ["a dead pixel", "a flickering screen", "no picture"],
    "headset": ["a broken microphone", "a loose cable", "no sound"],
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
REQUESTS = ["a refund", "a replacement", "a repair", "a call back"]
TICKETS = [
    "{name}, {city}, order {order}: my {product} has {problem} since {day}. I want {request}.",
    "This is {name} in {city}. Since {day} my {product} has {problem}. "
    "I want {request} for order {order}.",
    "Order {order} from {city}: the {product} has {problem} since {day}. Send {request}. {name}.",
]

ORDER_SYSTEM = "Turn the message into a purchase order."
ORDER_EXAMPLE = (
    "Nordlicht GmbH in Graz needs 40 boxes of paper and 5 staplers by noon. Ask for Eva Lang."
)
ORDER_ANSWER = """company: Nordlicht GmbH
city: Graz
items:
- paper, 40 boxes
- staplers, 5 pieces
delivery: before noon
contact: Eva Lang
note: Please confirm the delivery of paper and staplers to Graz to Eva Lang before noon."""
COMPANIES = ["Acme", "Baltic Foods", "City Works", "Delta Labs", "Eastern Rail", "Fine Prints"]
GOODS = ["envelopes", "folders", "pencils", "markers", "chairs", "lamps", "cables", "batteries"]
ORDERS = [
    "{company} in {city} needs {a} boxes of {first} and {b} boxes of {second} by {day}. "
    "Ask for {name}.",
    "{name} of {company}: send {a} boxes of {first} and {b} boxes of {second} to {city} by {day}.",
    "By {day} {company} wants {a} boxes of {first} and {b} boxes of {second} in {city}. {name}.",
]

TOPICS = [
    "the moon",
    "bicycles",
    "green tea",
    "volcanoes",
    "chess",
    "honey bees",
    "the ocean",
    "bread",
    "trains",
    "sleep",
    "music",
    "gardens",
    "coffee",
    "winter",
    "computers",
]
PEOPLE = ["a child", "a student", "a busy manager", "a tourist", "a new colleague"]
GENERAL_QUESTIONS = [
    "Explain {topic} to {person} in two sentences.",
    "Write a short poem about {topic}.",
    "Give three facts about {topic}.",
    "Write a polite email to {person} about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Tell a very short story about {topic} and {person}.",
]


@dataclass(frozen=True)
class Prompt:
    """One simulated request: chat messages plus what the client says about itself."""

    conversation_id: str
    domain: str
    messages: list[dict[str, str]]


def prompts(domain: str, count: int, seed: int) -> list[Prompt]:
    """`count` different prompts of a domain; equal arguments give equal prompts.

    Raises ValueError for an unknown domain or when the templates cannot give that many.
    """
    makers = {"tickets": _ticket, "general": _general, "orders": _order}
    if domain not in makers:
        raise ValueError(f"unknown demo domain {domain!r}: use one of {sorted(makers)}")
    rng = random.Random(f"{domain}/{seed}")
    found: dict[str, Prompt] = {}
    for _ in range(50 * count):
        messages = makers[domain](rng)
        text = messages[-1]["content"]
        found.setdefault(text, Prompt(f"{domain}-{seed}-{len(found)}", domain, messages))
        if len(found) == count:
            return list(found.values())
    raise ValueError(
        f"the {domain} templates give only {len(found)} different prompts, not {count}"
    )


def _ticket(rng: random.Random) -> list[dict[str, str]]:
    product = rng.choice(sorted(PROBLEMS))
    ticket = rng.choice(TICKETS).format(
        name=f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        city=rng.choice(CITIES),
        product=product,
        order=rng.randint(1000, 9999),
        problem=rng.choice(PROBLEMS[product]),
        day=rng.choice(DAYS),
        request=rng.choice(REQUESTS),
    )
    return [
        {"role": "system", "content": TICKET_SYSTEM},
        {"role": "user", "content": TICKET_EXAMPLE},
        {"role": "assistant", "content": TICKET_ANSWER},
        {"role": "user", "content": ticket},
    ]


def _general(rng: random.Random) -> list[dict[str, str]]:
    question = rng.choice(GENERAL_QUESTIONS).format(
        topic=rng.choice(TOPICS), person=rng.choice(PEOPLE)
    )
    return [{"role": "user", "content": question}]


def _order(rng: random.Random) -> list[dict[str, str]]:
    first, second = rng.sample(GOODS, 2)
    order = rng.choice(ORDERS).format(
        name=f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        company=rng.choice(COMPANIES),
        city=rng.choice(CITIES),
        day=rng.choice(DAYS),
        a=rng.randint(2, 60),
        b=rng.randint(2, 60),
        first=first,
        second=second,
    )
    return [
        {"role": "system", "content": ORDER_SYSTEM},
        {"role": "user", "content": ORDER_EXAMPLE},
        {"role": "assistant", "content": ORDER_ANSWER},
        {"role": "user", "content": order},
    ]
