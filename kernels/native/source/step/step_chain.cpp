#include "step/step_chain.h"

#include <algorithm>
#include <new>

namespace millrace {

void Chain::begin(int64_t number, const Decoding& decoding, const Asked& asked, int64_t num_rows) {
    model_.line->wait(&link(number));  // one that nobody asked for
    std::lock_guard<std::mutex> lock(filling_);
    fill(&link(number), number, decoding, asked, num_rows);
    link(number).before = nullptr;
    model_.line->add(&link(number));
}

bool Chain::follow(int64_t number, const Decoding& decoding, const Asked& asked, int64_t num_rows) {
    std::unique_lock<std::mutex> lock(filling_, std::try_to_lock);
    if (!lock || number < 1) return false;
    const Link& before = link(number - 1);
    if (before.number != number - 1 || link(number).number >= 0 || !model_.line->is_in_line(&before)) return false;
    fill(&link(number), number, decoding, asked, num_rows);
    link(number).before = &before;
    if (model_.line->add_behind(&link(number), &before)) return true;
    link(number).number = -1;
    return false;
}

Error Chain::wait(int64_t number, int64_t num_rows, int64_t* token_ids, uint8_t* is_broken) {
    Link& asked = link(number);
    model_.line->wait(&asked);
    std::lock_guard<std::mutex> lock(filling_);
    if (asked.number != number || int64_t(asked.slots.size()) != num_rows) return BAD_ROW;
    std::copy(asked.token_ids.begin(), asked.token_ids.end(), token_ids);
    std::copy(asked.is_broken.begin(), asked.is_broken.end(), is_broken);
    asked.number = -1;
    if (model_.shares) std::copy(asked.shares.begin(), asked.shares.end(), model_.shares);
    return asked.error;
}

void Chain::fill(Link* link, int64_t number, const Decoding& decoding, const Asked& asked, int64_t num_rows) {
    link->number = number, link->decoding = decoding, link->asked = asked, link->error = FINE;
    link->slots.assign(decoding.slots, decoding.slots + num_rows);
    link->starts.assign(decoding.starts, decoding.starts + num_rows);
    link->decoding.slots = link->slots.data(), link->decoding.starts = link->starts.data();
    link->places.resize(num_rows), link->token_ids.resize(num_rows), link->is_broken.resize(num_rows);
}

Error Chain::run(Link& link) {
    Error error = link.before ? link.before->error : FINE;
    try {
        if (error == FINE) error = decode_and_choose(link);
    } catch (const std::bad_alloc&) {
        error = NO_MEMORY;
    }
    link.shares = model_.pool->shares;
    return error;
}

Error Chain::decode_and_choose(Link& link) {
    int64_t num_rows = int64_t(link.slots.size()), vocab_size = model_.shape.vocab_size;
    auto is_random = [&](int64_t slot) {  // what is no slot, `decode` tells
        return slot >= 0 && slot < link.decoding.num_slots && link.asked.is_random[slot];
    };
    bool are_drawn = std::any_of(link.slots.begin(), link.slots.end(), is_random);
    Wanted wanted{nullptr, link.token_ids.data(), link.is_broken.data()};
    if (are_drawn) {
        ensure(&logits_, num_rows * vocab_size * 4);
        wanted = {logits_.as<float>()};
    }
    Error error = decode(model_, link.decoding, num_rows, wanted);
    if (error != FINE) return error;
    if (are_drawn) {
        for (int64_t row = 0; row < num_rows; row++)  // the token after the one that was read
            link.places[row] = link.starts[row] + 1 - link.asked.num_prompt[link.slots[row]];
        choose(model_, link.asked,
               {wanted.logits, num_rows, vocab_size, link.slots.data(), link.places.data(), nullptr, 0, nullptr,
                link.token_ids.data(), link.is_broken.data()});
    }
    for (int64_t row = 0; row < num_rows; row++) link.decoding.last_tokens[link.slots[row]] = link.token_ids[row];
    return FINE;
}

}  // namespace millrace
