"""A page of a report as tags and text."""

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
