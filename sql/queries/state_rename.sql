-- A row that no relay has adopted (posthaste mode before the first start) may be renamed.
UPDATE relay_state SET name = $1, changed_at = clock_timestamp() WHERE epoch = 0
