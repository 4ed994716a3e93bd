SELECT bucket, epoch, mark, bumped_at FROM credit_epoch WHERE bucket = ANY ($1::smallint[]) ORDER BY bucket FOR UPDATE SKIP LOCKED
