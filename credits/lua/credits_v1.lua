#!lua name=posthaste_credits_v1
-- Credits, version 1. A published library never changes: a change of behaviour is a new version with new names.
--
-- Keys of a bucket (all in one slot):
--   ep    hash    e epoch ('' = stopped), n number of the last operation, s highest n a caller sent before the stop,
--                 t n at the start of the epoch, l highest n of an older epoch that was counted as lost, v what the
--                 server had evicted at the start of the epoch
--   s     stream  one entry per operation, refusals included, until it is in the ledger
--   a:U   hash    account: b balance, q number of the last operation, e epoch, s last q in the ledger, f freeze reason
--   i:H   string  outcome of an operation (H: hash of user and operation):
--                 fp|code|amount|balance|seq|durability|stream id|epoch
--   l:U   string  lock of a load, or 'absent'
--
-- Every function checks everything that can fail (types, arguments, numbers, rights) before its first write, because
-- Redis does not undo the writes of a failed script. Numbers are printed with %.0f: Lua would write 1e+15.

local MAX = 999999999999999
local SCAN = 1000

local function text(n) return string.format('%.0f', n) end

-- stop ends the bucket's epoch: no process may change a balance until the bucket has been rebuilt from the ledger.
local function stop(ep, floor, seen)
  redis.call('HSET', ep, 'e', '', 's', text(math.max(floor, tonumber(seen or '0'))))
end

-- open returns n if the bucket is in the caller's epoch and complete, and nil otherwise. floor is an n that the caller
-- has seen: a smaller n now proves that Redis has lost operations, and open stops the bucket.
local function open(ep, epoch, floor)
  local h = redis.call('HMGET', ep, 'e', 'n', 's')
  local n, seen = tonumber(h[2] or '0'), tonumber(floor)
  if h[1] == epoch and n >= seen then return n end
  if n < seen and (not h[1] or h[1] == '' or h[1] == epoch) then stop(ep, seen, h[3]) end
  return nil
end

local function apply(keys, args, kind)
  local acct, idem, strm, ep = keys[1], keys[2], keys[3], keys[4]
  local amt, fp, user, op, epoch, floor = args[1], args[2], args[3], args[4], args[5], args[6]
  local ttl, maxlen, dur, ask, ref = args[7], args[8], args[9], args[10], args[11]
  if #amt > 12 or not string.match(amt, '^[1-9]%d*$') then return {'BAD_AMOUNT'} end
  local n = open(ep, epoch, floor)
  if not n then return {'EPOCH'} end
  local prev = redis.call('GET', idem)
  if prev then
    local f, code, a, b, q, d, id, e =
      string.match(prev, '^([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)$')
    if not f then return {'CORRUPT'} end
    if f ~= fp then return {'MISMATCH'} end
    -- An operation that was given up when an older epoch ended did not happen, even if its outcome is still here. The
    -- ledger decides.
    if e ~= epoch and ask ~= '2' then return {'ASK'} end
    if e == epoch then
      -- WAIT and WAITAOF guarantee to wait for the last write of their connection. A repeated call has no write yet, so
      -- it makes one. (Redis 7.0 happens to wait for everything before its last command, without guaranteeing it.)
      if dur ~= 'memory' then redis.call('PEXPIRE', idem, ttl) end
      return {'REPLAY', code, a, b, q, d, id, text(n)}
    end
  end
  if ask == '1' then return {'ASK'} end
  local h = redis.call('HMGET', acct, 'b', 'q', 'f', 'e')
  if h[4] ~= epoch then return {'MISS'} end
  if h[3] then return {'FROZEN'} end
  local bal, seq = tonumber(h[1]), tonumber(h[2])
  if not bal or not seq then return {'CORRUPT'} end
  if seq == 0 and kind == 'deduct' then return {'UNKNOWN'} end
  if redis.call('XLEN', strm) >= tonumber(maxlen) then return {'BACKPRESSURE'} end
  local code, nb = 'OK', bal + tonumber(amt)
  if kind == 'deduct' then nb = bal - tonumber(amt) end
  if nb < 0 then code, nb = 'INSUFFICIENT', bal end
  if nb > MAX then code, nb = 'OVERFLOW', bal end
  local b, q, m = text(nb), text(seq + 1), text(n + 1)
  -- XADD is the first write, and is refused by itself. A server compatible with Redis may not have acl_check_cmd.
  local may = redis.acl_check_cmd
  if may and not (may('HSET', acct, 'b', b) and may('SET', idem, '', 'PX', ttl)) then
    return redis.error_reply('NOPERM this user of Redis lacks the right to HSET or SET')
  end
  local id = redis.call('XADD', strm, '*', 'u', user, 'k', kind, 'c', code, 'a', amt, 'b', b, 'q', q, 'o', op, 'f', fp,
    'd', dur, 'e', epoch, 'n', m, 'r', ref)
  redis.call('HSET', acct, 'b', b, 'q', q)
  redis.call('HSET', ep, 'n', m)
  redis.call('SET', idem,
    fp .. '|' .. code .. '|' .. amt .. '|' .. b .. '|' .. q .. '|' .. dur .. '|' .. id .. '|' .. epoch, 'PX', ttl)
  return {code, code, amt, b, q, dur, id, m}
end

-- keys: account, outcome, stream, ep. args: amount, fp, user, op, epoch, floor, ttl ms, longest stream, durability; 1 =
-- reply ASK unless the outcome is known here, 2 = the ledger does not have the operation, 0 = neither; reference.
redis.register_function('cr_add_v1', function(k, a) return apply(k, a, 'add') end)
redis.register_function('cr_deduct_v1', function(k, a) return apply(k, a, 'deduct') end)

-- cr_check closes the bucket if it has lost operations. It serves callers that use only read-only functions otherwise.
-- keys: ep. args: epoch, floor.
redis.register_function{function_name = 'cr_check_v1', flags = {'allow-oom'}, callback = function(k, a)
  if open(k[1], a[1], a[2]) then return {'OK'} end
  return {'EPOCH'}
end}

-- keys: account, ep. args: epoch, floor.
redis.register_function{function_name = 'cr_get_v1', flags = {'no-writes'}, callback = function(k, a)
  local ep = redis.call('HMGET', k[2], 'e', 'n')
  if ep[1] ~= a[1] or tonumber(ep[2] or '0') < tonumber(a[2]) then return {'EPOCH'} end
  local h = redis.call('HMGET', k[1], 'b', 'q', 's', 'f', 'e')
  if h[5] ~= a[1] then return {'MISS'} end
  if h[2] == '0' then return {'UNKNOWN'} end
  return {'OK', h[1], h[2], h[3] or '0', h[4] or '', ep[2]}
end}

-- cr_lock lets one process load an account. keys: account, ep, lock. args: epoch, floor, token, ms, 1 = ignore a cached
-- 'absent'.
redis.register_function('cr_lock_v1', function(k, a)
  if not open(k[2], a[1], a[2]) then return {'EPOCH'} end
  if redis.call('HGET', k[1], 'e') == a[1] then return {'LOADED'} end
  local v = redis.call('GET', k[3])
  if v == 'absent' then
    if a[5] ~= '1' then return {'ABSENT'} end
  elseif v then
    return {'BUSY'}
  end
  redis.call('SET', k[3], a[3], 'PX', a[4])
  return {'LOCKED'}
end)

-- keys: lock. args: token.
redis.register_function{function_name = 'cr_unlock_v1', flags = {'allow-oom'}, callback = function(k, a)
  if redis.call('GET', k[1]) ~= a[1] then return {'OTHER'} end
  redis.call('DEL', k[1])
  return {'OK'}
end}

-- cr_load installs an account from the ledger, if it is absent and the ledger has all its operations. keys: account,
-- ep, stream, lock. args: balance, seq, why frozen or '', epoch, floor, the ledger's mark, user, token, ms. ms is for
-- how long to cache that the user has no account, if the ledger has none and the caller does not create one; otherwise
-- 0.
redis.register_function('cr_load_v1', function(k, a)
  local n, mark = open(k[2], a[4], a[5]), tonumber(a[6])
  if not n then return {'EPOCH'} end
  if redis.call('HGET', k[1], 'e') == a[4] then return {'EXISTS'} end
  if n < mark then
    stop(k[2], mark, nil)
    return {'EPOCH'}
  end
  if n > mark then
    -- Every operation after the mark must be in the stream, and must belong to another user. If there are fewer than n
    -- - mark, entries have reached the ledger since it was read.
    if redis.call('XLEN', k[3]) > SCAN then return {'BEHIND'} end
    local found = 0
    for _, e in ipairs(redis.call('XRANGE', k[3], '-', '+')) do
      local f = {}
      for i = 1, #e[2], 2 do f[e[2][i]] = e[2][i + 1] end
      if (tonumber(f['n'] or '0') or 0) > mark then
        found = found + 1
        if f['u'] == a[7] then return {'BEHIND'} end
      end
    end
    if found ~= n - mark then return {'BEHIND'} end
  end
  local mine = redis.call('GET', k[4])
  if a[9] ~= '0' then
    if mine == a[8] then redis.call('SET', k[4], 'absent', 'PX', a[9]) end
    return {'ABSENT'}
  end
  redis.call('DEL', k[1])
  redis.call('HSET', k[1], 'b', a[1], 'q', a[2], 's', a[2], 'e', a[4])
  if a[3] ~= '' then redis.call('HSET', k[1], 'f', a[3]) end
  if mine == a[8] or mine == 'absent' then redis.call('DEL', k[4]) end
  return {'OK'}
end)

-- keys: account. args: reason.
redis.register_function{function_name = 'cr_freeze_v1', flags = {'allow-oom'}, callback = function(k, a)
  if redis.call('EXISTS', k[1]) == 1 then redis.call('HSET', k[1], 'f', a[1]) end
  return {'OK'}
end}

-- cr_ack drops the entries that are in the ledger. keys: stream, ep, accounts. args: first id to keep, epoch of the
-- ledger when the entries were read, a seq per account. It also runs when memory is full, because it frees memory. It
-- drops nothing of a later epoch, whose ids may be lower. A seq that is lower than the account's is ignored: another
-- sync has already recorded a higher one.
redis.register_function{function_name = 'cr_ack_v1', flags = {'allow-oom'}, callback = function(k, a)
  local e = redis.pcall('HGET', k[2], 'e')
  if type(e) == 'string' and (tonumber(e) or 0) > tonumber(a[2]) then return {'EPOCH'} end
  redis.call('XTRIM', k[1], 'MINID', a[1])
  for i = 3, #k do
    if redis.call('EXISTS', k[i]) == 1 and (tonumber(redis.call('HGET', k[i], 's') or '') or 0) < tonumber(a[i]) then
      redis.call('HSET', k[i], 's', a[i])
    end
  end
  return {'OK'}
end}

-- keys: ep, stream.
redis.register_function{function_name = 'cr_look_v1', flags = {'no-writes'}, callback = function(k)
  local h = redis.call('HMGET', k[1], 'e', 'n', 's', 'v')
  return {h[1] or '', h[2] or '0', h[3] or '', text(redis.call('XLEN', k[2])), h[4] or ''}
end}

-- cr_init opens a bucket that was never used. keys: ep, stream. args: epoch.
redis.register_function('cr_init_v1', function(k, a)
  if redis.call('EXISTS', k[1], k[2]) > 0 then return {'USED'} end
  redis.call('HSET', k[1], 'e', a[1], 'n', '0')
  return {'OK'}
end)

-- keys: ep. args: an n that must have been reached.
redis.register_function{function_name = 'cr_stop_v1', flags = {'allow-oom'}, callback = function(k, a)
  local h = redis.call('HMGET', k[1], 'n', 's')
  stop(k[1], tonumber(a[1]), h[2])
  return {'OK'}
end}

-- cr_open starts an epoch: accounts of older epochs count as absent. keys: ep, stream. args: epoch, n, what the server
-- has evicted.
redis.register_function{function_name = 'cr_open_v1', flags = {'allow-oom'}, callback = function(k, a)
  local e = tonumber(redis.call('HGET', k[1], 'e') or '') or 0
  if e >= tonumber(a[1]) then return {'OLD'} end
  if redis.call('XLEN', k[2]) > 0 then return {'UNSYNCED'} end
  redis.call('HSET', k[1], 'e', a[1], 'n', a[2], 't', a[2], 'v', a[3])
  redis.call('HDEL', k[1], 's', 'l')
  return {'OK'}
end}

-- cr_claim returns how many operations were lost and not counted yet, up to floor, a number that the caller has seen in
-- an older epoch. The process that raised the epoch did not know of them. keys: ep. args: epoch, floor.
redis.register_function{function_name = 'cr_claim_v1', flags = {'allow-oom'}, callback = function(k, a)
  local h = redis.call('HMGET', k[1], 'e', 't', 'l')
  if h[1] ~= a[1] then return {'EPOCH'} end
  local from, floor = tonumber(h[3] or h[2] or a[2]), tonumber(a[2])
  if not from or floor <= from then return {'0'} end
  redis.call('HSET', k[1], 'l', a[2])
  return {text(floor - from)}
end}
