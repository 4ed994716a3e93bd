-- Lists the events of a stream after an entry, without those of a replay and without the bodies.
-- KEYS stream
-- ARGV the entry to begin at, as XRANGE takes it, how many entries and about how many bytes are scanned, the source
--      field of the events that count, '' for all
-- Answers {the last entry that was looked at, '' at the end of the stream, then per event entry and id}.
local PAGE = 10
local from, entries, bytes, name = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local answer = {''}
while entries > 0 and bytes > 0 do
  local page = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', PAGE)
  for i = 1, #page do
    local fields, id, replayed, mine = page[i][2], nil, false, name == ''
    for j = 1, #fields, 2 do
      bytes = bytes - #fields[j + 1]
      if fields[j] == 'id' then id = fields[j + 1] end
      replayed = replayed or fields[j] == 'replayed'
      mine = mine or fields[j] == 'source' and fields[j + 1] == name
    end
    if id and mine and not replayed then
      answer[#answer + 1] = page[i][1]
      answer[#answer + 1] = id
    end
  end
  if #page < PAGE then
    answer[1] = ''
    return answer
  end
  answer[1] = page[PAGE][1]
  from, entries = '(' .. answer[1], entries - PAGE
end
return answer
