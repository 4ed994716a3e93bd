-- Writes nothing, and is refused where nothing can be written.
UPDATE relay_state SET changed_at = changed_at WHERE false
