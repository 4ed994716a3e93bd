UPDATE credit_epoch e SET mark = m.mark FROM unnest($1::smallint[], $2::bigint[]) AS m(bucket, mark) WHERE e.bucket = m.bucket
