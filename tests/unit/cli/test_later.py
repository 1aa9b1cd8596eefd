import subprocess
import sys
from importlib.metadata import version

START = "import sys; from freetoken.cli.later import import_later; import_later(); "


def run(code):
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_are_read_at_their_first_use_and_are_themselves_from_then_on():
    assert run(
        "import difflib, secrets, importlib.metadata as metadata\n"
        "print('hashlib' in sys.modules, 'email' in sys.modules)\n"
        "print(difflib.get_close_matches('ab', ['abc']), len(secrets.token_bytes(3)), metadata.version('click'))\n"
        "print(sorted({type(sys.modules[one]).__name__ for one in ('difflib', 'secrets', 'importlib.metadata')}))\n"
    ) == (f"False False\n['abc'] 3 {version('click')}\n['module']\n")


def test_a_function_taken_by_name_reads_its_module_when_it_is_called():
    assert run(
        "from importlib.metadata import entry_points\n"
        "import importlib.metadata\n"
        "names = entry_points(group='console_scripts').names\n"
        "print('pytest' in names, importlib.metadata.entry_points is not entry_points)\n"
    ) == ("True True\n")


def test_a_name_that_a_module_lacks_is_an_attribute_error():
    assert run("import difflib\nprint(hasattr(difflib, 'nothing'), hasattr(difflib, 'nothing'))") == "False False\n"


def test_threads_that_use_a_module_at_once_all_find_it_whole():
    assert run(
        "import difflib\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    print(set(pool.map(lambda _: difflib.SequenceMatcher is not None, range(64))))\n"
    ) == ("{True}\n")


def test_what_is_there_already_stays_and_httpx_comes_without_rich():
    assert run(
        "import json; before = sys.modules['json']; import_later({'json': ()}); print(sys.modules['json'] is before)\n"
        "import httpx; print(httpx.Client is not None, 'rich' in sys.modules)\n"
    ) == ("True\nTrue False\n")
