UPDATE credit_epoch SET epoch = epoch + 1, mark = $2, bumped_at = clock_timestamp() WHERE bucket = $1 RETURNING epoch
