"""Several processes that train one model together: their launchers, their exchange of data, and what happens if one stops."""
