"""``python -m autosym``, and the command ``autosym``."""

import sys


def main() -> int:
    """The command line, or a word on how to get it."""
    try:
        from autosym.cli import commands
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        print("the command line needs tyro and rich: pip install 'autosym[cli]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while torch is imported
        return 130
    from autosym.runtime import processes

    with processes.joined():
        return commands.main()


if __name__ == "__main__":
    sys.exit(main())
