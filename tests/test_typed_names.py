"""Type checkers know the names that `import caveat` brings: the same ones, and no others."""

import ast
from pathlib import Path

import caveat
from caveat import public
from caveat.methods import built_in


def test_type_checkers_know_every_method_and_no_other() -> None:
    tree = ast.parse(Path(caveat.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    names = {
        alias.name: node.module.rpartition(".")[2]
        for node in imports
        for alias in node.names
        if node.module is not None and node.module.startswith("caveat.methods.") and alias.asname == alias.name
    }
    assert names == {method.__name__: name for name, method in built_in().items()}
    assert any(node.module == public.__name__ and node.names[0].name == "*" for node in imports)


def test_every_name_that_is_listed_is_there() -> None:
    for name in [*public.__all__, *(method.__name__ for method in built_in().values())]:
        assert name in dir(caveat)
        assert getattr(caveat, name) is not None
