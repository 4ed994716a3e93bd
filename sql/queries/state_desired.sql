UPDATE relay_state SET desired_mode = $2, changed_at = clock_timestamp() WHERE name = $1
