"""Does a chat template write contents as they are, whatever they say?

Templates that do can be laid out from markup and contents apart, and seen to be right on a few rows. One that looks at
contents (`if '</think>' in message.content`) may rewrite one dialogue in a thousand: every row has to be rendered.
"""

from __future__ import annotations

from jinja2 import Environment, TemplateError, nodes

# What may be done to a content without a look at what it says; contents come stripped, and are never empty.
HARMLESS_TESTS = {"string", "defined", "undefined", "none"}
HARMLESS_FILTERS = {"trim", "string"}
LIST_FILTERS = {"length", "count", "list", "first", "last"}
MAPPING_METHODS = {"items", "values", "keys", "get", "copy", "pop", "update"}
# What is written inside of these may be changed by what stands around them, or by whoever calls a macro.
BLOCKS = (nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock, nodes.Macro, nodes.ScopedEvalContextModifier)


def depends_on_content(template: str) -> bool:
    """Whether what the template writes may depend on what a message says, beyond writing it out.

    Contents may be written, joined to other text, kept in a variable, stripped, and asked whether they are there or are
    a string. Anything else that touches one, or a message as a whole, counts. In doubt the answer is yes.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return True
    return _Analysis(tree).depends()


class _Analysis:
    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.lists = {"messages"}  # names of lists of messages
        self.messages: set[str] = set()  # names of messages
        self.contents: set[str] = set()  # names of contents, or of texts made with them

    def depends(self) -> bool:
        """The answer; names are followed through assignments until no more are found."""
        before = -1
        while before != (before := len(self.lists) + len(self.messages) + len(self.contents)):
            for loop in self.tree.find_all(nodes.For):
                if isinstance(loop.target, nodes.Name) and self._is_list(loop.iter):
                    self.messages.add(loop.target.name)
            for node in self.tree.find_all(nodes.Assign):
                if isinstance(node.target, nodes.Name):
                    for names, is_one in ((self.lists, self._is_list), (self.messages, self._is_message)):
                        if is_one(node.node):
                            names.add(node.target.name)
                    if self._has_content(node.node):
                        self.contents.add(node.target.name)
                elif self._has_content(node.node):
                    return True
        if any(self._has_content(node) for node in self.tree.find_all(BLOCKS)):
            return True
        return any(self._misuses(child) for child in self.tree.iter_child_nodes())

    def _is_list(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self.lists
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Slice) and self._is_list(node.node)
        return (
            isinstance(node, nodes.Filter)
            and node.name == "list"
            and node.node is not None
            and self._is_list(node.node)
        )

    def _is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self.messages
        if isinstance(node, nodes.Getitem):
            return not isinstance(node.arg, nodes.Slice) and self._is_list(node.node)
        return (
            isinstance(node, nodes.Filter)
            and node.name in ("first", "last")
            and node.node is not None
            and self._is_list(node.node)
        )

    def _is_content(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Name) and node.name in self.contents

    def _holds_content(self, node: nodes.Node | None) -> bool:
        """Whether the value of this is a content, or a text made with one in a way that is allowed."""
        if isinstance(node, nodes.Concat):
            return any(self._holds_content(part) for part in node.nodes)
        if isinstance(node, nodes.Add | nodes.And | nodes.Or):
            return self._holds_content(node.left) or self._holds_content(node.right)
        if isinstance(node, nodes.CondExpr):
            return self._holds_content(node.expr1) or self._holds_content(node.expr2)
        if isinstance(node, nodes.Filter):
            return node.name in HARMLESS_FILTERS and self._holds_content(node.node)
        if isinstance(node, nodes.Call):
            return isinstance(node.node, nodes.Getattr) and self._holds_content(node.node.node)
        return self._is_content(node)

    def _has_content(self, node: nodes.Node) -> bool:
        return self._is_content(node) or any(self._has_content(child) for child in node.iter_child_nodes())

    def _misuses(self, node: nodes.Node) -> bool:
        """Whether a content, or a message whole, is used here or below in another way than those allowed."""
        if self._is_content(node):
            return False
        if isinstance(node, nodes.Test) and node.name in HARMLESS_TESTS:
            return False
        if (
            isinstance(node, nodes.Call)
            and isinstance(node.node, nodes.Getattr)
            and self._holds_content(node.node.node)
        ):
            return node.node.attr != "strip" or bool(node.args) or self._misuses(node.node.node)
        for child in node.iter_child_nodes():
            if self._holds_content(child) and not self._may_hold_content(node, child):
                return True
            if (self._is_message(child) or self._is_list(child)) and not self._may_hold_message(node, child):
                return True
        return any(self._misuses(child) for child in node.iter_child_nodes())

    def _may_hold_content(self, node: nodes.Node, child: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter):
            return node.name in HARMLESS_FILTERS and not node.args
        if isinstance(node, nodes.For):
            return child is not node.iter
        return isinstance(
            node,
            nodes.Output | nodes.Concat | nodes.Add | nodes.Assign | nodes.If | nodes.CondExpr | nodes.And | nodes.Or,
        )

    def _may_hold_message(self, node: nodes.Node, child: nodes.Node) -> bool:
        """Messages may be walked over, counted, taken out of their list, and asked for a field by its name."""
        if isinstance(node, nodes.Filter):
            return self._is_list(child) and node.name in LIST_FILTERS
        if isinstance(node, nodes.Getattr):
            return node.attr not in MAPPING_METHODS
        if isinstance(node, nodes.Getitem):
            return child is node.node and (self._is_list(child) or isinstance(node.arg, nodes.Const))
        if isinstance(node, nodes.For):
            return child in (node.iter, node.target)
        return isinstance(node, nodes.Assign | nodes.If | nodes.And | nodes.Not)
