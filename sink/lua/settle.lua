-- Removes batches whose rows are settled.
-- KEYS stream, register, gate. ARGV epoch, nonce, then per mark lane, claim, claim's nonce, number
local gate = KEYS[3]

local g, err = read('HMGET', gate, 'owner', 'doubt')
if err then return err end
local no = assess(g[1], ARGV[1], ARGV[2])
if no then return no end

-- HDEL comes first: Redis allows it without memory, and then allows the rest of the script.
local old = {}
for i = 3, #ARGV, 4 do
  local lane, claim, nonce, number = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], tonumber(ARGV[i + 3])
  local v = redis.call('HGET', gate, 'l:' .. lane)
  if v then
    local c, n, last, settled = lane_of(v)
    if c > claim then
      -- A later claim has already turned these batches into doubt.
      local key = lane .. '|' .. int(claim)
      old[key] = math.max(old[key] or 0, number)
    elseif c == claim and n == nonce and number > settled then
      number = math.min(number, last)
      hdel(gate, unsettled(lane, settled, number))
      redis.call('HSET', gate, 'l:' .. lane, int(c) .. '|' .. n .. '|' .. int(last) .. '|' .. int(number))
    end
  end
end

local doubt = tonumber(g[2] or '0')
if next(old) and doubt > 0 then
  local all, drop = redis.call('HGETALL', gate), {}
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'd:' then
      local key, number = string.match(all[i + 1], '^(%w+|%d+)|(%d+)$')
      if key and old[key] and tonumber(number) <= old[key] then drop[#drop + 1] = all[i] end
    end
  end
  if #drop > 0 then set_doubt(gate, doubt - hdel(gate, drop)) end
end
return {'OK'}
