SELECT created_at, 'order', id::text, amount::text || ' ' || currency::text || ' ' || status, '', '', '',
    created_at, '', created_at, ''
FROM orders WHERE id = $1::uuid
