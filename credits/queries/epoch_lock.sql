SELECT bucket, epoch, mark, issued, bumped_at FROM credit_epoch WHERE bucket = ANY ($1::smallint[]) ORDER BY bucket FOR UPDATE SKIP LOCKED
