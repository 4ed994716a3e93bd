UPDATE credit_epoch e SET mark = m.mark, issued = m.issued FROM unnest($1::smallint[], $2::bigint[],
    $3::bigint[]) AS m(bucket, mark, issued) WHERE e.bucket = m.bucket
