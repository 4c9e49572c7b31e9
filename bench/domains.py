"""Two more domains for studies: seeded prompts made from templates, as in the demo.

`sql`: from a question about a table to a query and its explanation. `reviews`: from a product
review to a verdict with reasons. The answers are the target's own.
"""

import random

from jobs.demo_data.prompts import Prompt

Messages = list[dict[str, str]]

SQL_SYSTEM = "Write the SQL query for the question, then explain it in one sentence."
SQL_EXAMPLE = "Table rivers(name, country, length). How many rivers has Peru?"
SQL_ANSWER = (
    "SELECT COUNT(*) FROM rivers WHERE country = 'Peru';\n"
    "The query counts the rows of rivers in which country is Peru."
)
TABLES = {
    "employees": (["city", "team"], ["salary", "age"]),
    "orders": (["status", "country"], ["total", "items"]),
    "flights": (["airline", "origin"], ["price", "distance"]),
    "students": (["school", "course"], ["grade", "credits"]),
    "movies": (["genre", "director"], ["rating", "budget"]),
    "houses": (["street", "owner"], ["rooms", "rent"]),
}
VALUES = [
    "Berlin",
    "Sales",
    "Open",
    "Norway",
    "North",
    "History",
    "Drama",
    "Green",
    "Lee",
    "Premium",
]
SQL_QUESTIONS = [
    "How many {table} have {text} {value}?",
    "What is the average {number} of {table} by {text}?",
    "List the {table} with {number} above {limit} and {text} {value}.",
    "Which {text} has the highest total {number}?",
    "Show the five {table} with the largest {number} where {text} is {value}.",
    "For each {text}, count the {table} with {number} below {limit}.",
]

REVIEW_SYSTEM = "Say whether the review is positive or negative, and give two reasons."
PRODUCTS = ["blender", "backpack", "lamp", "tent", "camera", "chair", "kettle", "speaker", "jacket"]
GOOD = ["it is light", "it looks great", "it was cheap", "it works every day", "my family loves it"]
BAD = ["it broke in a week", "it is too loud", "the color is wrong", "it smells", "it came late"]
REVIEWS = [
    "I bought this {product} for my {person}. {first} and {second}.",
    "After {days} days with the {product}: {first}, {second}.",
    "The {product}? {first}. Also, {second}. Bought {days} days ago.",
]


def prompts(domain: str, count: int, seed: int) -> list[Prompt]:
    """`count` different prompts of `sql` or `reviews`; equal arguments give equal prompts.

    Raises ValueError when the templates cannot give that many.
    """
    rng = random.Random(f"{domain}/{seed}")
    found: dict[str, Prompt] = {}
    for _ in range(50 * count):
        messages = {"sql": _sql, "reviews": _review}[domain](rng)
        name = f"{domain}-{seed}-{len(found)}"
        found.setdefault(messages[-1]["content"], Prompt(name, domain, messages))
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"the {domain} templates give only {len(found)} prompts, not {count}")


def _sql(rng: random.Random) -> Messages:
    table = rng.choice(sorted(TABLES))
    texts, numbers = TABLES[table]
    question = rng.choice(SQL_QUESTIONS).format(
        table=table,
        text=rng.choice(texts),
        number=rng.choice(numbers),
        value=rng.choice(VALUES),
        limit=rng.randint(2, 99) * 10,
    )
    columns = ", ".join(["id", *texts, *numbers])
    return [
        {"role": "system", "content": SQL_SYSTEM},
        {"role": "user", "content": SQL_EXAMPLE},
        {"role": "assistant", "content": SQL_ANSWER},
        {"role": "user", "content": f"Table {table}({columns}). {question}"},
    ]


def _review(rng: random.Random) -> Messages:
    first, second = rng.sample(rng.choice([GOOD, BAD]), 2)
    review = rng.choice(REVIEWS).format(
        product=rng.choice(PRODUCTS),
        person=rng.choice(["son", "mother", "friend", "team"]),
        days=rng.randint(2, 60),
        first=first.capitalize(),
        second=second,
    )
    return [{"role": "system", "content": REVIEW_SYSTEM}, {"role": "user", "content": review}]
