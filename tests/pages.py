"""The rows of a symmetry, of which a page is made, and a page as tags and text."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """A page as a list of (tag, attributes) and its text; refuses tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.values = [], [], [], {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "data":
            self.values.setdefault(dict(attributes)["data-key"], []).append(dict(attributes)["value"])

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if not {"style", "script"} & set(self.open):
            self.words.append(text)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def path(name="conv", layer="1", share=1.0, symmetric=True, omega=None, precision=None):
    return {
        "layer": layer,
        "path": name,
        "symmetric": symmetric,
        "precision": {"linear": 1.0} if precision is None else precision,
        "parameters": 10,
        "effective_parameters": 5.0,
        "share": share,
        "omega": omega or {},
    }


def network(*free_shares):
    """The symmetry of a network of layers with a convolution and a free path."""
    rows = []
    for layer, share in enumerate(free_shares):
        rest = None if share is None else 1 - share
        rows += [path("conv", f"l{layer}", rest), path("f-fc", f"l{layer}", share, symmetric=False)]
    return rows
