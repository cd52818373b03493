"""Files written whole, TOML read with line numbers, shipped data found, tables as text: what knows nothing of models or machines."""
